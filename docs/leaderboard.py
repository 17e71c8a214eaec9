"""The page about the leaderboard, from the runs' records in docs/leaderboard/BOARD.csv.

    python docs/leaderboard.py add WORKDIR BOARD    # the finished runs of a sweep of configs/sweeps/leaderboard.py
    python docs/leaderboard.py    # prints the page; the site has it as leaderboard.md

A record is a line for each run: its accuracies of the last rounds, bytes and seconds, the row's number of tries and
the fields that they chose, the commit, JAX and processor, and the checksum of the run's metrics. The page has no figure
that is not computed from these lines. `add` reads runs whose metrics have their checksum and whose configuration is the
board's with the fields of the row's best try, and no others; all tries of the row must be over. The sweep's words for
data and weights, like --config.data.path=FILE, follow BOARD. Lines of the same method and seed are replaced, so boards
may grow on several machines.
"""

import csv
import io
import json
import pathlib
import re
import runpy
import statistics
import sys
from collections.abc import Sequence

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.fields import CHANGES_NO_RESULT
from fedjax_ssl.base.files import replace_file
from fedjax_ssl.config import differences, for_seed
from fedjax_ssl.records.runs import RunRecords, read_run
from fedjax_ssl.records.workdir import LOG, SUMMARY
from fedjax_ssl.report.look import to_markdown
from fedjax_ssl.report.table import LAST, NOTHING, OverSeeds, costs, half_interval
from fedjax_ssl.sweep import TRIES, Cell, Sweep, accuracies_of, load_sweep, plan
from fedjax_ssl.sweep.search import row_and_number, tries_of, with_best

DOCS = pathlib.Path(__file__).parent
SWEEP = DOCS.parent / "configs" / "sweeps" / "leaderboard.py"
RECORDS = DOCS / "leaderboard"
BOUND, ALONE = "All labels", "Labels alone"
OF_DATA = ("data.source", "data.path", "data.flip", "encoder.weights")  # of boards whose data are in files
NUMBER, ACCURACY, PAIR = r"\d+(\.\d+)?(e[+-]\d\d)?", r"(100(\.0+)?|\d\d?(\.\d+)?)", r"[\w.]+=[\w.+-]+"
COLUMNS = {  # of a record -> what may be in it, since records come from anybody
    "method": ".+",
    "seed": r"\d+",
    "rounds": r"\d+",
    "accuracies": f"{ACCURACY}( {ACCURACY})*",  # percent
    "MB": NUMBER,
    "seconds": NUMBER,
    "tries": r"\d+",
    "chosen": f"({PAIR}( {PAIR})*)?",
    "commit": "[0-9a-f]*",
    "jax": r"[\w.+]+",
    "processor": r"[\w .,()@+/-]+",
    "records": "[0-9a-f]+",
}
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


def differing(cell: Cell, seed: int, run: RunRecords) -> list[str]:
    """The fields in which a run is not the planned one."""
    planned = json.loads(json.dumps(for_seed(cell.config, seed).to_dict()))
    return sorted(set(differences(planned, run.config)) - set(CHANGES_NO_RESULT))


def diverged(cell: Cell, seed: int) -> bool:
    """Whether a planned run has ended because its numbers were not finite."""
    folder = cell.folder / f"seed_{seed}"
    log = (folder / LOG).read_text(encoding="utf-8", errors="replace") if (folder / LOG).exists() else ""
    return "ended by TrainingError" in log[log.rstrip().rfind("\n") :] and not differing(cell, seed, read_run(folder))


def after_tries(sweep: Sweep, workdir: pathlib.Path, overrides: Sequence[str]) -> tuple[Sweep, int, dict[str, str]]:
    """The sweep whose rows have the fields of their best tries, as `run_sweep` makes it.

    Returns:
        The sweep; the number of tries a row, 0 without any; row -> a try of it that has neither finished nor diverged.
    """
    places = [path.name.rpartition("_")[2] for path in (workdir / TRIES).glob("*_try_*")]
    number, seed = max((int(place) + 1 for place in places if place.isdecimal()), default=0), sweep.search.seed
    tries = sweep._replace(methods=tries_of(sweep.methods, sweep.search, number), seeds=(seed,))
    cells = plan(tries, workdir / TRIES, overrides)
    found = accuracies_of(cells)
    left = [cell.name for cell in cells if cell.name not in found and not diverged(cell, seed)]
    best = with_best(sweep.methods, sweep.search, number, found, lambda line: None)
    return sweep._replace(methods=best), number, {row_and_number(name)[0]: name for name in left}


def record(board: str, workdir: pathlib.Path, overrides: Sequence[str] = ()) -> list[dict[str, str]]:
    """The lines of the finished runs in a sweep's folder.

    Raises:
        UserError: there is none, or one is damaged or not the board's, or a word changes the board.
    """
    sweep = load_sweep(f"{SWEEP}:{board}")
    fields = (*CHANGES_NO_RESULT, *(() if board.startswith(("digits", "table")) else OF_DATA))
    if others := [word for word in overrides if word.removeprefix("--config.").partition("=")[0] not in fields]:
        raise UserError(f"{others[0]!r} would make another board than {board}")
    best, tries, waiting = after_tries(sweep, workdir, overrides)
    lines = []
    for own, cell in zip(plan(sweep, workdir, overrides), plan(best, workdir, overrides)):
        chosen = sorted(differences(own.config.to_dict(), cell.config.to_dict()).items())
        for seed in cell.seeds:
            folder = cell.folder / f"seed_{seed}"
            if not (folder / SUMMARY).exists():
                continue
            if cell.name in waiting:
                raise UserError(f"{folder} is not recorded: {waiting[cell.name]!r} is not over, or not of this board")
            run = read_run(folder)
            if not run.is_finished or run.damages:
                raise UserError(f"{folder} is not recorded: {'; '.join(run.damages) or 'it is not finished'}")
            if others := differing(cell, seed, run):
                raise UserError(f"{folder} is not of this board after {tries} tries: it differs in {', '.join(others)}")
            size = costs(run)
            figures = {
                "method": cell.name,
                "seed": seed,
                "rounds": len(run.metrics),
                "accuracies": " ".join(f"{100 * accuracy:.3f}" for accuracy in run.accuracy()[-LAST:]),
                "MB": f"{size['MB down'] + size['MB up']:.4g}",
                "seconds": f"{size['seconds']:.4g}",
                "tries": tries,
                "chosen": " ".join(f"{field}={value}" for field, (_, value) in chosen),
                "commit": (run.summary["commit"] or "")[:12],
                "jax": run.summary["versions"]["jax"],
                "processor": run.summary.get("processor", "-"),
                "records": run.summary["metrics_sha256"][:16],
            }
            lines.append({name: str(value) for name, value in figures.items()})
    if not lines:
        raise UserError(f"{workdir} has no finished run of {board}")
    return lines


def parse(board: str, text: str) -> list[dict[str, str]]:
    """The lines of a board's records, which may come from anybody, checked.

    Raises:
        UserError: there is no such board, or its records are not as `add` writes them.
    """
    sweep = load_sweep(f"{SWEEP}:{board}")
    reader = csv.DictReader(io.StringIO(text), restkey="one more cell", restval="")
    lines = list(reader)
    if reader.fieldnames != list(COLUMNS) or not lines:
        raise UserError(f"{board}.csv must have lines with the columns {', '.join(COLUMNS)}")
    missing = {(method, str(seed)) for method in sweep.methods for seed in sweep.seeds}
    for line in lines:
        where = f"{board}.csv, {line['method']!r:.40} with seed {line['seed']!r:.9}"
        for name, cell in line.items():
            allowed = re.fullmatch(COLUMNS.get(name, "(?!)"), str(cell), re.ASCII)
            if not allowed or (name == "accuracies" and len(cell.split()) != LAST):
                raise UserError(f"{where}: {name} cannot be {cell!r:.80}")
        if (line["method"], line["seed"]) not in missing:
            raise UserError(f"{where}: the board has no such run, or the file has it twice")
        missing.remove((line["method"], line["seed"]))
    return lines


def read(board: str) -> list[dict[str, str]]:
    """The committed lines of a board; [] without any. Raises a UserError if they are not usable."""
    path = RECORDS / f"{board}.csv"
    return parse(board, path.read_text(encoding="utf-8", errors="replace")) if path.exists() else []


def add(workdir: pathlib.Path, board: str, overrides: Sequence[str] = ()) -> None:
    """Puts the finished runs of a folder into a board's records."""
    new = record(board, workdir, overrides)
    lines = {(line["method"], line["seed"]): line for line in [*read(board), *new]}
    text = io.StringIO()
    text.write(",".join(COLUMNS) + "\n")
    csv.DictWriter(text, list(COLUMNS), quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(lines.values())
    parse(board, text.getvalue())
    RECORDS.mkdir(exist_ok=True)
    replace_file(RECORDS / f"{board}.csv", text.getvalue())


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
    parts = [HEAD] if any(RECORDS.glob("*.csv")) else [HEAD, "No board has been run yet.\n"]
    for path in sorted(RECORDS.glob("*.csv")):
        lines = read(path.stem)
        for name in ("tries", "rounds"):
            if len(found := {line[name] for line in lines}) > 1:
                raise UserError(f"{path} has runs of {' and '.join(sorted(found))} {name}; all need the same number")
        if len({line["method"] for line in lines}) < len({(line["method"], line["chosen"]) for line in lines}):
            raise UserError(f"{path} has seeds of one method with different chosen fields; record them anew")
        data, _, labels = path.stem.partition("_")
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
    sweep, left = runpy.run_path(str(SWEEP)), []
    for board in sweep["ROWS"]:
        methods = {line["method"] for line in read(board)} if (RECORDS / f"{board}.csv").exists() else set()
        missing = [name for name in sweep["get_sweep"](board).methods if name not in methods]
        if missing:
            left.append(f"* `{board}`" + (f": {', '.join(missing)}" if methods else ""))
    return left


if __name__ == "__main__":
    try:
        match sys.argv[1:]:
            case []:
                print(page(), end="")
            case ["add", workdir, board, *words]:
                add(pathlib.Path(workdir), board, words)
            case _:
                raise UserError("the arguments are none, or add WORKDIR BOARD and the sweep's --config words")
    except (UserError, csv.Error, OSError) as error:
        raise SystemExit(f"error: {error}") from error
