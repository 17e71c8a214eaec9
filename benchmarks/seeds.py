"""Variants of a run over seeds, on the same partitions: a table of means, spreads and paired differences.

    python benchmarks/seeds.py --seeds=0,1,2 --workdir=runs/digits \\
        'fedanchor: --config=configs/quickstart.py' \\
        'anchors: --config=configs/quickstart.py:anchors_only'

Each argument is a name and the words of a `launch.py` command line. Runs lie in WORKDIR/NAME/SEED; one that is
finished is not run again, one that was stopped goes on. Differences are against the last variant, seed by seed.
The table is printed, and written to WORKDIR/table.json.
"""

import argparse
import json
import math
import pathlib
import shlex
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIGURES = (
    "test_accuracy",
    "best_test_accuracy",
    "pseudo_label_accuracy_anchor_head",
    "pseudo_label_accuracy_classification_head",
    "qualified_accuracy",
    "qualified_share",
)


def run(words: list[str], workdir: pathlib.Path, seed: int) -> dict:
    """Runs the command line to its end, unless that has been done; returns its summary."""
    summary = workdir / "summary.json"
    if not summary.exists():
        command = [sys.executable, str(ROOT / "launch.py"), *words, f"--config.seed={seed}", f"--workdir={workdir}"]
        subprocess.run(command, check=True, cwd=ROOT)
    return json.loads(summary.read_text())


def mean_and_spread(values: list[float | None]) -> str:
    """Mean ± standard deviation over seeds, in percent."""
    if None in values:
        return "-"
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):.2f} ± {100 * spread:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", metavar="'NAME: WORDS'")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    variants = {name.strip(): shlex.split(words) for name, _, words in (v.partition(":") for v in options.variants)}

    found: dict[str, list[dict]] = {name: [] for name in variants}
    for seed in seeds:  # seed by seed, so that an unfinished comparison is a fair one
        for name, words in variants.items():
            found[name].append(run(words, (options.workdir / name / str(seed)).absolute(), seed))

    baseline = list(variants)[-1]
    print(f"\n{len(seeds)} seeds; mean ± standard deviation, percent\n")
    print("| variant | " + " | ".join(name.replace("_", " ") for name in FIGURES) + " | minutes |")
    print("|" + "---|" * (len(FIGURES) + 2))
    table = {}
    for name, summaries in found.items():
        columns = {figure: [summary.get(figure) for summary in summaries] for figure in FIGURES}
        minutes = statistics.mean(summary["seconds"] for summary in summaries) / 60
        print(f"| {name} | " + " | ".join(map(mean_and_spread, columns.values())) + f" | {minutes:.1f} |")
        table[name] = {"seeds": seeds, "words": variants[name], "minutes": minutes, **columns}
    for name in list(variants)[:-1]:
        pairs = zip(table[name]["test_accuracy"], table[baseline]["test_accuracy"])
        differences = [mine - base for mine, base in pairs]
        if len(differences) > 1:
            error = statistics.stdev(differences) / math.sqrt(len(differences))
            print(
                f"\n{name} - {baseline}: test accuracy {100 * statistics.mean(differences):+.2f} points, "
                f"standard error {100 * error:.2f} (paired by seed)"
            )
    (options.workdir / "table.json").write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
