"""The page docs/leaderboard.md, from the runs' records in docs/leaderboard/BOARD.csv.

    python docs/leaderboard.py add WORKDIR BOARD    # the finished runs of a sweep of configs/sweeps/leaderboard.py
    python docs/leaderboard.py > docs/leaderboard.md

A record is a line for each run: its accuracies of the last rounds, bytes and seconds, the row's number of tries and
the fields that they chose, the commit, JAX and processor, and the checksum of the run's metrics. The page has no figure
that is not computed from these lines. `add` reads runs whose metrics have their checksum and whose configuration is the
board's but for the fields that are drawn, and no others; words like --config.data.path=FILE that the sweep had follow
BOARD. Lines of the same method and seed are replaced, so boards may grow on several machines.
"""

import csv
import json
import pathlib
import statistics
import sys
from collections.abc import Sequence

from fedjax_ssl.config import differences, for_seed
from fedjax_ssl.errors import UserError
from fedjax_ssl.fields import CHANGES_NO_RESULT
from fedjax_ssl.files import replace_file
from fedjax_ssl.records.runs import read_run
from fedjax_ssl.report.table import LAST, costs, half_interval
from fedjax_ssl.sweep import TRIES, load_sweep, plan

DOCS = pathlib.Path(__file__).parent
SWEEP = DOCS.parent / "configs" / "sweeps" / "leaderboard.py"
RECORDS = DOCS / "leaderboard"
BOUND, ALONE = "All labels", "Labels alone"
COLUMNS = (
    "method",
    "seed",
    "rounds",
    "accuracies",
    "MB",
    "seconds",
    "tries",
    "chosen",
    "commit",
    "jax",
    "processor",
    "records",
)
HEAD = """# Leaderboard

Every method at its best of the same number of tries, on the same partitions, weights and cohorts.
A board is one data set with one place of the labels. This page is made from the records of the runs
in `docs/leaderboard/`; the sweep's file, `configs/sweeps/leaderboard.py`, says what all rows share.
`table` is the digits as rows of 64 numbers, `features` are EfficientNet-Lite0's of the first 4,096
images of CIFAR-10.

```
export JAX_NUM_CPU_DEVICES=1   # these two: to compile sooner, where runs are as short as on digits
export XLA_FLAGS=--xla_backend_optimization_level=0   # JAX 0.10 also has --xla_cpu_use_fusion_emitters=false
python launch.py sweep configs/sweeps/leaderboard.py:BOARD --workdir=runs/BOARD --tries=6
python docs/leaderboard.py add runs/BOARD BOARD
python docs/leaderboard.py > docs/leaderboard.md
```

The sweep goes on where it was stopped; `--rows='FixMatch;UDA'` runs some rows. Boards of `features`
also take the [data and weights](results/frozen_encoders.md#commands) as `--config` words, in both
commands. Runs of other machines are welcome as a pull request with their lines.

`accuracy` is the mean of the last five rounds on the test set in percent, over the seeds with their
standard deviation. `minus labels alone` is the mean difference from the row *Labels alone* of the
same seed, with its 95 % confidence interval. Methods in bold cannot be told from the best one: the
interval of their paired difference holds 0. `MB` are both ways, of all clients and rounds; seconds
are those of the rounds, without compiling, on machines that may have had other work. A try that
diverges is lost. *All labels* sees the labels of all clients and has no rank.

FedAvg-Semi and SemiAnAgg are made for clients that have labels for all their images or for none.
Where each client has a few, nearly all of their steps are on pseudo-labels.
"""


def record(board: str, workdir: pathlib.Path, overrides: Sequence[str] = ()) -> list[dict[str, str]]:
    """The lines of the finished runs in a sweep's folder."""
    lines = []
    sweep = load_sweep(f"{SWEEP}:{board}")
    for cell in plan(sweep, workdir, overrides):
        tries = len(list((workdir / TRIES).glob(f"{cell.folder.name}_try_*/seed_*/config.json")))  # diverged ones, too
        for seed in cell.seeds:
            folder = cell.folder / f"seed_{seed}"
            if not (folder / "summary.json").exists():
                continue
            try:
                run = read_run(folder)
            except UserError as error:
                raise SystemExit(str(error)) from error
            if run.summary is None or run.damages:
                raise SystemExit(f"{folder} is not recorded: {'; '.join(run.damages)}")
            own = json.loads(json.dumps(for_seed(cell.config, seed).to_dict()))
            found = {field: value for field, (_, value) in differences(own, run.config).items()}
            chosen = {field: found.pop(field) for field in sorted(sweep.search.of(cell.name)) if field in found}
            if others := sorted(set(found) - set(CHANGES_NO_RESULT)):
                raise SystemExit(f"{folder} is not of this board: it differs in {', '.join(others)}")
            size = costs(run)
            figures = {
                "method": cell.name,
                "seed": seed,
                "rounds": len(run.metrics),
                "accuracies": " ".join(f"{100 * accuracy:.3f}" for accuracy in run.accuracy()[-LAST:]),
                "MB": f"{size['MB down'] + size['MB up']:.4g}",
                "seconds": f"{size['seconds']:.4g}",
                "tries": tries,
                "chosen": " ".join(f"{field}={value}" for field, value in chosen.items()),
                "commit": (run.summary["commit"] or "")[:12],
                "jax": run.summary["versions"]["jax"],
                "processor": run.summary.get("processor", "-"),
                "records": run.summary["metrics_sha256"][:16],
            }
            lines.append({name: str(value) for name, value in figures.items()})
    return lines


def read(board: str) -> list[dict[str, str]]:
    """The committed lines of a board."""
    path = RECORDS / f"{board}.csv"
    return list(csv.DictReader(path.open(encoding="utf-8"))) if path.exists() else []


def add(workdir: pathlib.Path, board: str, overrides: Sequence[str] = ()) -> None:
    """Puts the finished runs of a folder into a board's records."""
    lines = {(line["method"], line["seed"]): line for line in [*read(board), *record(board, workdir, overrides)]}
    rows = [",".join(COLUMNS), *(",".join(f'"{line[name]}"' for name in COLUMNS) for line in lines.values())]
    RECORDS.mkdir(exist_ok=True)
    replace_file(RECORDS / f"{board}.csv", "\n".join(rows) + "\n")


def table(lines: list[dict[str, str]]) -> str:
    """The Markdown table of a board."""
    methods: dict[str, dict[str, float]] = {}
    for line in lines:
        of_rounds = [float(accuracy) for accuracy in line["accuracies"].split()]
        methods.setdefault(line["method"], {})[line["seed"]] = statistics.mean(of_rounds)

    def mean(method: str) -> float:
        return statistics.mean(methods[method].values())

    def minus(method: str, other: str) -> list[float]:
        shared = methods[method].keys() & methods.get(other, {}).keys()
        return [methods[method][seed] - methods[other][seed] for seed in sorted(shared)]

    ranked = sorted((method for method in methods if method != BOUND), key=mean, reverse=True)
    rows = ["| rank | method | accuracy | minus labels alone | MB | seconds | seeds | chosen |", "|" + "---|" * 8]
    for place, method in enumerate([*ranked, *({BOUND} & methods.keys())], start=1):
        own = [line for line in lines if line["method"] == method]
        accuracies, apart = list(methods[method].values()), minus(method, ALONE)
        spread = f" ± {statistics.stdev(accuracies):.2f}" if len(accuracies) > 1 else ""
        behind = minus(method, ranked[0]) if method != BOUND else []
        level = method in ranked[:1] or (len(behind) > 1 and abs(statistics.mean(behind)) <= half_interval(behind))
        gain = "-"
        if method != ALONE and len(apart) > 1:
            gain = f"{statistics.mean(apart):+.2f} ± {half_interval(apart):.2f}"
        cells = (
            "-" if method == BOUND else str(place),
            f"**{method}**" if level else method,
            f"{mean(method):.2f}{spread}",
            gain,
            *(f"{statistics.mean(float(line[name]) for line in own):.4g}" for name in ("MB", "seconds")),
            str(len(own)),
            own[0]["chosen"] or "its own values",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def page() -> str:
    """The page."""
    parts = [HEAD] if any(RECORDS.glob("*.csv")) else [HEAD, "No board has been run yet.\n"]
    for path in sorted(RECORDS.glob("*.csv")):
        lines = read(path.stem)
        if len(tries := {line["tries"] for line in lines}) > 1:
            raise SystemExit(f"{path} has rows of {' and '.join(sorted(tries))} tries; all need the same number")
        if len(rounds := {line["rounds"] for line in lines}) > 1:
            raise SystemExit(f"{path} has runs of {' and '.join(sorted(rounds))} rounds; all need the same number")
        if len({line["method"] for line in lines}) < len({(line["method"], line["chosen"]) for line in lines}):
            raise SystemExit(f"{path} has seeds of one method with different chosen fields; record them anew")
        data, _, labels = path.stem.partition("_")
        made = {name: sorted({line[name] for line in lines}) for name in ("commit", "jax", "processor")}
        parts.append(f"## {data}: labels at {labels.replace('_', ' ')}\n\n{table(lines)}\n")
        parts.append(
            f"{tries.pop()} tries a row. Commit {', '.join(made['commit'])}; JAX {', '.join(made['jax'])}; "
            f"{'; '.join(made['processor'])}.\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    if sys.argv[1:2] == ["add"]:
        add(pathlib.Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
    else:
        print(page(), end="")
