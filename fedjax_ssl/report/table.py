"""The table of several runs: mean and spread over seeds, rounds and bytes to an accuracy."""

import math
import statistics
from collections.abc import Mapping, Sequence
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


class OverSeeds(NamedTuple):
    """A figure of a row's runs, one value for each; as text its mean ± standard deviation."""

    values: list[float | None]  # of the runs; None if it was not measured or not reached
    seeds: Sequence[int] = ()  # of the same runs

    @property
    def present(self) -> list[float]:
        """The values that are not None."""
        return [value for value in self.values if value is not None]

    def __str__(self) -> str:
        return f"{mean_and_spread(self.present)}{_share(self.values)}"

    def numbers(self) -> dict[str, float | int | None]:
        """Suffixes of the column's name -> mean, standard deviation (of n - 1) and n."""
        present = self.present
        return {
            "": statistics.mean(present) if present else None,
            " std": statistics.stdev(present) if len(present) > 1 else None,
            " n": len(present),
        }


class Interval(OverSeeds):
    """A figure whose text is its mean ± half of its confidence interval."""

    def __str__(self) -> str:
        present = self.present
        spread = f" ± {half_interval(present):.2f}" if len(present) > 1 else ""
        return f"{statistics.mean(present):.2f}{spread}{_share(self.values)}" if present else "-"


class MeanOfSeeds(OverSeeds):
    """A figure whose text is only its mean, to four digits."""

    def __str__(self) -> str:
        return of_those_that_did(self.values)


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
    """The figures of each row, column -> text, number, or a cell with both: `OverSeeds`, `MeanOfSeeds`, `Seeds`.

    Accuracies are percent, mean ± standard deviation (of n - 1) over the seeds. Test accuracy, other measures of the
    test set and accuracy over clients are those of the last model; measures that no run has get no column. The last
    rounds, the best and the target refer to the set that runs measure each round. Columns of validation accuracies are
    named so; if some rows measure validation images and others the test set, each set has its own columns. Rounds and
    bytes to the target are means over the seeds that reached it, with the number of these seeds if not all did. The
    same holds for the test accuracy of runs with validation images, which have none before their end. Bytes are of one
    run, both ways for all clients; seconds are those of its rounds, without compiling.

    Args:
        rows: of the table.
        target: accuracy on the set that is measured each round, a share.
    """
    runs = [run for row in rows for run in row.runs]
    sets, measures = _sets_of(runs), _measures_of(runs)
    table = []
    for row in rows:
        by_round, seeds = {}, [run.config["seed"] for run in row.runs]
        for measured in sets:
            own = [run for run in row.runs if run.measured == measured]
            of_set = [by_rounds(run, measured, sets, target) for run in own]
            for name in rounds_columns(measured, sets, target):
                kind = MeanOfSeeds if " to " in name else OverSeeds
                by_round[name] = kind([figures[name] for figures in of_set], [run.config["seed"] for run in own])
        table.append(
            {
                "method": _marked(row),
                **row.values,
                "seeds": Seeds(len(row.runs), row.num_seeds, sum(not run.is_finished for run in row.runs)),
                **{
                    name: OverSeeds([tested(run, measures)[name] for run in row.runs], seeds)
                    for name in tested_columns(measures)
                },
                **{
                    name: OverSeeds([run.client_figures().get(name) for run in row.runs], seeds)
                    for name in of_clients(runs)
                },
                **by_round,
                **{name: MeanOfSeeds([costs(run)[name] for run in row.runs]) for name in COSTS},
            }
        )
    return table


def make_runs_table(rows: list[Row], target: float) -> list[dict[str, Any]]:
    """A line for each run of each row, column -> text or number: the long form for statistics and plots.

    Args:
        rows: see `make_table`, whose columns these are, with the same units.
        target: accuracy on the set that is measured each round, a share.

    Returns:
        The lines; None for what was not measured or not reached.
    """
    runs = [run for row in rows for run in row.runs]
    sets, measures = _sets_of(runs), _measures_of(runs)
    lines = []
    for row in rows:
        for run in row.runs:
            by_round: dict[str, Any] = {}
            for measured in sets:
                empty = dict.fromkeys(rounds_columns(measured, sets, target))
                by_round |= by_rounds(run, measured, sets, target) if run.measured == measured else empty
            lines.append(
                {
                    "method": _marked(row),
                    **row.values,
                    "seed": run.config["seed"],
                    "rounds": run.metrics[-1]["round"],
                    "finished": int(run.is_finished),
                    **tested(run, measures),
                    **{name: run.client_figures().get(name) for name in of_clients(runs)},
                    **by_round,
                    **costs(run),
                }
            )
    return lines


COSTS = ("MB down", "MB up", "seconds")


def costs(run: RunRecords) -> dict[str, float]:
    """The costs of a run: megabytes each way, and the seconds of its rounds."""
    sent = (sum(run.values(f"bytes_{way}")) / 1e6 for way in ("down", "up"))
    return dict(zip(COSTS, (*sent, run.seconds())))


def tested_columns(measures: Mapping[str, str]) -> dict[str, str]:
    """Column -> the metric, for accuracy and other measures on the test set."""
    return {"test accuracy": "accuracy", **{f"test {words}": name for name, words in measures.items()}}


def tested(run: RunRecords, measures: Mapping[str, str]) -> dict[str, float | None]:
    """The last model's figures on the test set, in percent."""
    shares = {column: run.tested(f"test_{name}") for column, name in tested_columns(measures).items()}
    return {column: None if share is None else 100 * share for column, share in shares.items()}


def of_clients(runs: list[RunRecords]) -> list[str]:
    """The columns of accuracy over clients that any run has."""
    return list(dict.fromkeys(name for run in runs for name in run.client_figures()))


def rounds_columns(measured: str, sets: list[str], target: float) -> list[str]:
    """The columns of what is measured each round on one set; they name the set unless all runs measure the test set."""
    of, percent = "" if sets == ["test"] else f" ({measured})", f"{100 * target:g} %"
    return [f"{name}{of}" for name in (f"last {LAST} rounds", "best", f"rounds to {percent}", f"MB to {percent}")]


def by_rounds(run: RunRecords, measured: str, sets: list[str], target: float) -> dict[str, float | None]:
    """A run's figures for the columns of `rounds_columns`; `measured` is the set that it measures."""
    reached = rounds_to(run, target)
    figures = (100 * run.accuracy()[-LAST:].mean(), 100 * run.best()[0], reached, reached and megabytes(run, reached))
    return dict(zip(rounds_columns(measured, sets, target), figures))


def _marked(row: Row) -> str:
    return f"{row.name} ({REVEALED})" if row.labels_revealed else row.name


def _sets_of(runs: list[RunRecords]) -> list[str]:
    return sorted({run.measured for run in runs}) or ["test"]


def _measures_of(runs: list[RunRecords]) -> dict[str, str]:
    return {name: words for run in runs for name, words in run.measures().items()}


def half_interval(values: list[float]) -> float:
    """Half of the confidence interval of a mean of at least two values, by Student's t."""
    degrees = len(values) - 1
    return float(stdtrit(degrees, (1 + CONFIDENCE) / 2)) * statistics.stdev(values) / math.sqrt(len(values))


def rounds_to(run: RunRecords, target: float) -> int | None:
    """The first round with the target accuracy on the set that is measured each round; None if no round has it."""
    reached = run.accuracy().astype(np.float32) >= np.float32(target)  # accuracies are computed in float32
    return next((line["round"] for line, there in zip(run.metrics, reached) if there), None)


def megabytes(run: RunRecords, rounds: int) -> float:
    """Megabytes sent both ways in the first `rounds` rounds."""
    return sum(line["bytes_down"] + line["bytes_up"] for line in run.metrics[:rounds]) / 1e6


def of_those_that_did(values: list[float | None]) -> str:
    """The mean over the seeds that have a value, and their number if not all have one."""
    return f"{mean([value for value in values if value is not None])}{_share(values)}"


def _share(values: list[float | None]) -> str:
    """How many seeds have a value, as text, if only some have one."""
    present = sum(value is not None for value in values)
    return f" ({present} of {len(values)})" if 0 < present < len(values) else ""


def mean(values: list[float]) -> str:
    """The mean to four digits; '-' without values."""
    return f"{statistics.mean(values):.4g}" if values else "-"


def mean_and_spread(values: list[float]) -> str:
    """Mean ± standard deviation; a single value has no spread."""
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"
