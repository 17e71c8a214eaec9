"""Faults of all kinds in large numbers; docs/reliability.md has the figures, and the tests have each fault
once.

    python benchmarks/reliability.py                       # all parts, one after the other
    python benchmarks/reliability.py --part=flips,kills    # some
    python benchmarks/reliability.py --list                # all parts and their time limits

Each part is a file of benchmarks/faults/, whose docstring describes it. A part makes no new tries after its time limit.
Prints a table: each fault's tries, and how many ended right, with a line that names the fault, silently with other
results, with lost results, with a traceback. The exit status is 1 if one of the last three occurs.
"""

import argparse
import importlib
import os
import pathlib
import pkgutil
import sys
import tempfile
import time

import faults
from harness import describe, write


def main() -> None:
    """Reads the arguments, runs the parts, and writes the outcomes."""
    names = [module.name for module in pkgutil.iter_modules(faults.__path__) if module.name != "common"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default=",".join(names), help="names, with commas between; all by default")
    parser.add_argument("--list", action="store_true", help="say what the parts are, and run none")
    parser.add_argument("--count", type=int, help="tries of each part; each part's own number by default")
    parser.add_argument("--minutes", type=float, help="of each part, at most; each part's own number by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="reliability.json")
    options = parser.parse_args()
    chosen = options.part.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    # Child processes load the library from here, too.
    root = str(pathlib.Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    sys.path.insert(0, root)
    parts = {name: importlib.import_module(f"faults.{name}") for name in chosen}
    for name, part in parts.items():
        minutes, count = options.minutes or part.MINUTES, options.count or part.COUNT
        print(f"{name}: {count} tries, {minutes:g} minutes at most. {part.__doc__.splitlines()[0]}", flush=True)
    if options.list:
        return
    from faults.common import Trial

    rows = []
    for name, part in parts.items():
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="reliability") as folder:
            trial = Trial(
                pathlib.Path(folder), options.seed, options.count or part.COUNT, options.minutes or part.MINUTES
            )
            for row in part.run(trial):
                rows.append({"part": name, "tries": row.tries, **row._asdict()})
                print(rows[-1], flush=True)
        print(f"{name}: {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
    order = ("part", "fault", "tries", "right", "told", "silent", "lost", "tracebacks", "note")
    write(options.out, describe(), [{name: row[name] for name in order} for row in rows])
    bad = sum(row[name] for row in rows for name in ("silent", "lost", "tracebacks"))
    print(f"\n{sum(row['tries'] for row in rows)} tries, {bad} that must not be")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
