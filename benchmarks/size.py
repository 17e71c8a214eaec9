"""Prints how large the library is: lines, fields, refusals, rooms, words, and what a reader opens for a client step.

    python -m benchmarks.size                     # the table; --root=FOLDER: of another checkout
    python -m benchmarks.size --write             # tests/size.json, whose numbers only fall (tests/test_size.py)
    python -m benchmarks.size --reading fixmatch  # what each file and definition of a client step costs

Lines of a step include docstrings.
"""

import argparse
import json
import pathlib

from tests.helpers.runs import ROOT
from tests.helpers.size import HELD, NAME, Source, code_lines, measure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="the checkout to measure")
    parser.add_argument("--write", action="store_true", help="replace the numbers that tests hold by the present ones")
    parser.add_argument("--reading", metavar="METHOD", help="list what a reader of a method's client step opens")
    given = parser.parse_args()
    if given.reading:
        for (module, name), lines in sorted(Source(given.root / NAME).step_of(given.reading).items()):
            print(f"{lines:5}  {module}.{name}")
        return
    found = measure(given.root)
    found["package: code lines"] = sum(code_lines(file.read_text()) for file in (given.root / NAME).rglob("*.py"))
    by_room = found.pop("lines by room")
    for name, number in [*found.items(), *((f"lines of {name}", lines) for name, lines in by_room.items())]:
        print(f"{name:32} {number:7,}")
    if given.write:
        programs = json.loads(HELD.read_text())["programs"]  # `make test` counts them
        HELD.write_text(json.dumps({**found, "programs": programs, "lines by room": by_room}, indent=2) + "\n")


if __name__ == "__main__":
    main()
