"""The page about the leaderboard, from the runs' records in docs/leaderboard/BOARD.csv.

    python docs/leaderboard.py add WORKDIR BOARD    # the finished runs of a sweep of configs/sweeps/leaderboard.py
    python docs/leaderboard.py    # writes docs/leaderboard.md

docs/board_records.py says what a record is, and checks it. The page has no figure that is not computed from records.
"""

import pathlib
import runpy
import statistics

from board_records import Boards, command, paired, per_seed

from fedjax_ssl.report.look import to_markdown
from fedjax_ssl.report.table import NOTHING, OverSeeds, half_interval

DOCS = pathlib.Path(__file__).parent
BOARDS = Boards(DOCS.parent / "configs" / "sweeps" / "leaderboard.py", DOCS / "leaderboard")
BOUND, ALONE = "All labels", "Labels alone"
HEAD = """# Leaderboard

Every method at its best of the same number of tries, on the same partitions, weights and cohorts.
A board is one data set with one place of the labels. This page is made from the records of the runs
in `docs/leaderboard/`; the sweep's file, `configs/sweeps/leaderboard.py`, says what all rows share.
`table` is the digits as rows of 64 numbers, `features` are EfficientNet-Lite0's of the first 4,096
images of CIFAR-10. Boards of `digits-defaults` and `mnist-defaults` have no tries: a row is
`--config=configs/quickstart.py:METHOD`, or `fedanchor_mnist.py`, and no other choice, with three
seeds.

```
export JAX_NUM_CPU_DEVICES=1   # these two: to compile sooner, where runs are as short as on digits
export XLA_FLAGS=--xla_backend_optimization_level=0   # JAX 0.10 also has --xla_cpu_use_fusion_emitters=false
python launch.py sweep configs/sweeps/leaderboard.py:BOARD --workdir=runs/BOARD --tries=6
python docs/leaderboard.py add runs/BOARD BOARD
```

The sweep goes on where it was stopped; `--rows='FixMatch;UDA'` runs some rows. Boards of `features`
also take the [data and weights](results/frozen_encoders.md#commands) as `--config` words, those of
`mnist` and `cifar10` the data, in both commands; `add` takes no others. It records a row once all
its tries are over. Runs of other machines are welcome as a pull request with their lines.

`accuracy` is the mean of the last five rounds on the test set in percent, over the seeds with their
standard deviation. `minus labels alone` is the mean difference from the row *Labels alone* of the
same seed, with its 95 % confidence interval. Methods in bold cannot be told from the best one: the
interval of their paired difference holds 0. `MB` are both ways, of all clients and rounds; seconds
are those of the rounds, without compiling, on machines that may have had other work. A try that
diverges is lost. *All labels* sees the labels of all clients and has no rank.

FedAvg-Semi and SemiAnAgg are made for clients that have labels for all their images or for none.
Where each client has a few, nearly all of their steps are on pseudo-labels.
"""


def table(lines: list[dict[str, str]]) -> str:
    """The Markdown table of a board."""
    methods = per_seed(lines)

    def mean(method: str) -> float:
        return statistics.mean(methods[method].values())

    def minus(method: str, other: str) -> list[float]:
        return list(paired(methods, method, other).values())

    ranked = sorted((method for method in methods if method != BOUND), key=mean, reverse=True)
    rows, bold = [], set()
    for place, method in enumerate([*ranked, *({BOUND} & methods.keys())]):
        own = [line for line in lines if line["method"] == method]
        apart = minus(method, ALONE) if method != ALONE else []
        behind = minus(method, ranked[0]) if method != BOUND else []
        if method in ranked[:1] or (len(behind) > 1 and abs(statistics.mean(behind)) <= half_interval(behind)):
            bold.add((place, "method"))
        gain = f"{statistics.mean(apart):+.2f} ± {half_interval(apart):.2f}" if len(apart) > 1 else "-"
        rows.append(
            {
                "rank": "-" if method == BOUND else place + 1,
                "method": method,
                "accuracy": OverSeeds(list(methods[method].values())),
                "minus labels alone": gain,
                **{name: OverSeeds([float(line[name]) for line in own], spread=NOTHING) for name in ("MB", "seconds")},
                "seeds": len(own),
                "chosen": own[0]["chosen"] or "its own values",
            }
        )
    return to_markdown(rows, bold).rstrip()


def page() -> str:
    """The page."""
    parts = [HEAD] if BOARDS.recorded() else [HEAD, "No board has been run yet.\n"]
    for board in BOARDS.recorded():
        lines = BOARDS.agreed(board)
        data, _, labels = board.partition("_")
        made = {name: sorted({line[name] for line in lines}) for name in ("commit", "jax", "processor")}
        parts.append(f"## {data}: labels at {labels.replace('_', ' ')}\n\n{table(lines)}\n")
        parts.append(
            f"{lines[0]['tries']} tries a row. Commit {', '.join(made['commit'])}; JAX {', '.join(made['jax'])}; "
            f"{'; '.join(made['processor'])}.\n"
        )
    if left := _left():
        parts.append("\n".join(["## Not run yet\n", *left, ""]))
    return "\n".join(parts)


def _left() -> list[str]:
    """A line for each board of which rows have no record; it names them if others have one."""
    sweep, left = runpy.run_path(str(BOARDS.sweep)), []
    for board in sweep["ROWS"]:
        methods = {line["method"] for line in BOARDS.read(board)}
        missing = [name for name in sweep["get_sweep"](board).methods if name not in methods]
        if missing:
            left.append(f"* `{board}`" + (f": {', '.join(missing)}" if methods else ""))
    return left


if __name__ == "__main__":
    command(BOARDS, page)
