"""The table of several runs: mean and spread over seeds, rounds and bytes to an accuracy."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from fedjax_ssl.records.runs import RunRecords

LAST = 5  # rounds, whose mean says more than the last round if accuracies jump
REVEALED = "labels revealed"  # mark of an upper bound that sees the clients' labels
CONFIDENCE = 0.95  # level of the intervals


class Row(NamedTuple):
    """Runs that differ only in the seed."""

    name: str  # such as the method's
    values: Mapping[str, Any]  # the other columns that distinguish it from other rows
    runs: list[RunRecords]  # the finished ones
    num_seeds: int  # how many are planned
    labels_revealed: bool  # whether they are upper bounds that see the clients' labels


# What an `OverSeeds` shows beside its mean.
NOTHING, DEVIATION, INTERVAL, ERROR = "nothing", "standard deviation", "confidence interval", "standard error"


class OverSeeds(NamedTuple):
    """A figure of a row's runs, one value for each; as text its mean, and ± what `spread` names."""

    values: list[float | None]  # of the runs; None if it was not measured or not reached
    seeds: Sequence[int] = ()  # of the same runs
    # NOTHING: the mean has four digits. ERROR: the values are differences, whose mean has a sign; how many are above 0
    # is shown, too, for a sign test, since a few seeds cannot show a normal distribution.
    spread: str = DEVIATION

    @property
    def present(self) -> list[float]:
        """The values that are not None."""
        return [value for value in self.values if value is not None]

    @property
    def is_share(self) -> bool:
        """Whether it is an accuracy or another share, which has a best row."""
        return self.spread in (DEVIATION, INTERVAL)

    def __str__(self) -> str:
        present = self.present
        if not present:
            return "-"
        mean = statistics.mean(present)
        some = f" ({len(present)} of {len(self.values)})" if len(present) < len(self.values) else ""
        if self.spread == NOTHING:
            return f"{mean:.4g}{some}"
        around = f" ± {_SPREADS[self.spread](present):.2f}" if len(present) > 1 else ""
        if self.spread == ERROR:
            return f"{mean:+.2f}{around} ({self._above()} of {len(present)} above 0)"
        return f"{mean:.2f}{around}{some}"

    def _above(self) -> int:
        return sum(value > 0 for value in self.present)

    def numbers(self) -> dict[str, float | int | None]:
        """Suffixes of the column's name -> mean, standard deviation (of n - 1) or error, and n."""
        name, of = (ERROR, standard_error) if self.spread == ERROR else ("std", statistics.stdev)
        above = {" above 0": self._above()} if self.spread == ERROR else {}
        return {
            "": statistics.mean(self.present) if self.present else None,
            f" {name}": of(self.present) if len(self.present) > 1 else None,
            **above,
            " n": len(self.present),
        }


def standard_error(values: list[float]) -> float:
    """The standard error of the mean of at least two values."""
    return statistics.stdev(values) / math.sqrt(len(values))


def half_interval(values: list[float]) -> float:
    """Half of the confidence interval of a mean of at least two values, by Student's t."""
    return float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * standard_error(values)


_SPREADS: dict[str, Callable[[list[float]], float]] = {
    DEVIATION: statistics.stdev,
    INTERVAL: half_interval,
    ERROR: standard_error,
}


class Seeds(NamedTuple):
    """How many seeds a row has."""

    done: int
    planned: int
    unfinished: int

    def __str__(self) -> str:
        return f"{self.done} of {self.planned}" + (f" ({self.unfinished} unfinished)" if self.unfinished else "")

    def numbers(self) -> dict[str, int]:
        """Suffixes of the column's name -> numbers."""
        return {"": self.done, " planned": self.planned, " unfinished": self.unfinished}


def make_table(rows: list[Row], target: float) -> list[dict[str, Any]]:
    """The figures of each row, column -> text, number, or a cell with both: `OverSeeds`, `Seeds`.

    Accuracies are percent, mean ± standard deviation (of n - 1) over the seeds. Test accuracy, other measures of the
    test set and accuracy over clients are those of the last model; measures that no run has get no column. The last
    rounds, the best and the target refer to the set that runs measure each round, and to rounds with a test. Columns of
    validation accuracies are named so; if some rows measure validation images and others the test set, each set has its
    own columns. Rounds and bytes to the target are means over the seeds that reached it, with the number of these seeds
    if not all did. The same holds for the test accuracy of runs with validation images, which have none before their
    end. Bytes are of one run, both ways for all clients; seconds are those of its rounds, without compiling.
    `target` is an accuracy on the set that is measured each round, a share.
    """
    columns = _columns([run for row in rows for run in row.runs], target)
    table = []
    for row in rows:
        lines = [_figures(run, columns, target) for run in row.runs]
        seeds = [run.config["seed"] for run in row.runs]
        unfinished = sum(not run.is_finished for run in row.runs)
        costs = {name for name in columns if name in COSTS or name.startswith(("rounds to ", "MB to "))}
        cells = {
            name: OverSeeds([line[name] for line in lines], seeds, NOTHING if name in costs else DEVIATION)
            for name in columns
        }
        done = {"seeds": Seeds(len(row.runs), row.num_seeds, unfinished)}
        table.append({"method": _marked(row), **row.values, **done, **cells})
    return table


def make_runs_table(rows: list[Row], target: float) -> list[dict[str, Any]]:
    """A line for each run of each row, column -> text or number: the long form for statistics and plots.

    Arguments, columns and units are those of `make_table`; None stands for what was not measured or not reached.
    """
    lines, columns = [], _columns([run for row in rows for run in row.runs], target)
    for row in rows:
        for run in row.runs:
            state = {"rounds": run.metrics[-1]["round"], "finished": int(run.is_finished)}
            begin = {"method": _marked(row), **row.values, "seed": run.config["seed"], **state}
            lines.append(begin | _figures(run, columns, target))
    return lines


def _columns(runs: list[RunRecords], target: float) -> list[str]:
    """The columns of figures: of the test set, of clients, of the sets that are measured each round, and costs."""
    sets = sorted({run.measured for run in runs}) or ["test"]
    names = ["test accuracy", *(f"test {words}" for run in runs for words in run.measures().values())]
    names += [name for run in runs for name in run.client_figures()]
    for measured in sets:  # columns name the set unless all runs measure the test set
        names += [f"{name}{'' if sets == ['test'] else f' ({measured})'}" for name in _of_rounds(target)]
    return list(dict.fromkeys([*names, *COSTS]))


def _of_rounds(target: float) -> list[str]:
    return [f"last {LAST} rounds", "best", f"rounds to {100 * target:g} %", f"MB to {100 * target:g} %"]


def _figures(run: RunRecords, columns: list[str], target: float) -> dict[str, float | None]:
    """A run's figures for the columns; None for what it has not measured."""
    reached = rounds_to(run, target)
    of_rounds = (100 * run.accuracy()[-LAST:].mean(), 100 * run.best()[0], reached, reached and megabytes(run, reached))
    found = dict(zip(_of_rounds(target), of_rounds))
    measures = {"accuracy": "accuracy", **run.measures()}
    shares = {f"test {words}": run.tested(f"test_{name}") for name, words in measures.items()}
    known = {
        **{name: None if share is None else 100 * share for name, share in shares.items()},
        **run.client_figures(),
        **{f"{name} ({run.measured})": figure for name, figure in found.items()},
        **(found if run.measured == "test" else {}),
        **costs(run),
    }
    return {name: known.get(name) for name in columns}


COSTS = ("MB down", "MB up", "seconds")


def costs(run: RunRecords) -> dict[str, float]:
    """The costs of a run: megabytes each way, and the seconds of its rounds."""
    sent = (sum(run.values(f"bytes_{way}")) / 1e6 for way in ("down", "up"))
    return dict(zip(COSTS, (*sent, run.seconds())))


def _marked(row: Row) -> str:
    return f"{row.name} ({REVEALED})" if row.labels_revealed else row.name


def rounds_to(run: RunRecords, target: float) -> int | None:
    """The first round with the target accuracy on the set that is measured each round; None if no round has it."""
    reached = run.accuracy().astype(np.float32) >= np.float32(target)  # accuracies are computed in float32
    return next((line["round"] for line, there in zip(run.tests(), reached) if there), None)


def megabytes(run: RunRecords, rounds: int) -> float:
    """Megabytes sent both ways in the first `rounds` rounds."""
    return sum(line["bytes_down"] + line["bytes_up"] for line in run.metrics[:rounds]) / 1e6
