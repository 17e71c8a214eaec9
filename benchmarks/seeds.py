"""Compares variants of a run over seeds, on the same partitions: a table of means, spreads and paired differences.

    python benchmarks/seeds.py --seeds=0,1,2 --workdir=runs/digits \\
        'fedanchor: --config=configs/quickstart.py' \\
        'anchors: --config=configs/quickstart.py:no_clients'

Each argument is a name and the words of a `launch.py` command line. Runs are in WORKDIR/NAME/SEED; finished runs are
not repeated, stopped runs are resumed. The test accuracy is the last model's. The best and the last rounds are by the
set that a run measures each round; their columns say if that is validation. Differences are to the last variant, seed
by seed. The table is printed and written to WORKDIR/table.json.
"""

import argparse
import json
import math
import pathlib
import shlex
import statistics
import subprocess
import sys

from fedjax_ssl.records.runs import read_run

ROOT = pathlib.Path(__file__).resolve().parent.parent
OF_LAST_ROUNDS = 5  # a round's labels are of one cohort: their figures are means over the last rounds
LAST_ROUNDS = {
    "test_accuracy": f"test accuracy, last {OF_LAST_ROUNDS} rounds",
    "validation_accuracy": f"validation accuracy, last {OF_LAST_ROUNDS} rounds",
    "pseudo_label_accuracy_anchor_head": "labels by anchor head",
    "pseudo_label_accuracy_classification_head": "labels by classification head",
    "qualified_accuracy": "qualified labels",
    "qualified_share": "qualified share",
}


def run(words: list[str], workdir: pathlib.Path, seed: int) -> dict:
    """Runs the command line to its end, unless already done; returns its figures."""
    if not (workdir / "summary.json").exists():
        command = [sys.executable, str(ROOT / "launch.py"), *words, f"--config.seed={seed}", f"--workdir={workdir}"]
        subprocess.run(command, check=True, cwd=ROOT)
    run = read_run(workdir)
    best = "best validation accuracy" if run.measured == "validation" else "best test accuracy"
    figures = {"test accuracy": run.tested("test_accuracy"), best: run.best()[0]}
    for name, title in LAST_ROUNDS.items():
        values = [line[name] for line in run.metrics[-OF_LAST_ROUNDS:] if line.get(name) is not None]
        figures[title] = statistics.mean(values) if values else None
    return {**figures, "minutes": run.seconds() / 60}


def mean_and_spread(values: list[float | None]) -> str:
    """Mean ± standard deviation over seeds, in percent; a single seed has no spread."""
    if None in values:
        return "-"
    spread = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.2f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", metavar="'NAME: WORDS'")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    variants = {name.strip(): shlex.split(words) for name, _, words in (v.partition(":") for v in options.variants)}

    found: dict[str, list[dict]] = {name: [] for name in variants}
    for seed in seeds:  # seed by seed, so that an unfinished comparison is fair
        for name, words in variants.items():
            found[name].append(run(words, (options.workdir / name / str(seed)).absolute(), seed))

    baseline = list(variants)[-1]
    measured = {name: value for runs in found.values() for name, value in runs[0].items() if value is not None}
    columns = [name for name in measured if name != "minutes"]
    print(f"\n{len(seeds)} seeds; mean ± standard deviation, percent\n")
    print(f"| variant | {' | '.join(columns)} | minutes |")
    print("|" + "---|" * (len(columns) + 2))
    table = {}
    for name, runs in found.items():
        table[name] = {column: [figures.get(column) for figures in runs] for column in [*columns, "minutes"]}
        cells = [mean_and_spread(table[name][column]) for column in columns]
        print(f"| {name} | {' | '.join(cells)} | {statistics.mean(table[name]['minutes']):.1f} |")
    for name in list(variants)[:-1]:
        for column in ("test accuracy", LAST_ROUNDS["validation_accuracy"]):
            pairs = list(zip(table[name].get(column, [None]), table[baseline].get(column, [None])))
            if len(pairs) < 2 or any(None in pair for pair in pairs):
                continue
            differences = [mine - base for mine, base in pairs]
            error = statistics.stdev(differences) / math.sqrt(len(differences))
            print(
                f"\n{name} - {baseline}: {column} {100 * statistics.mean(differences):+.2f} points, "
                f"standard error {100 * error:.2f} (paired by seed)"
            )
    result = {"seeds": seeds, "variants": variants, "table": table}
    (options.workdir / "table.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
