"""Differences from a reference row, paired by seed: runs of one seed share partition, initialisation and cohorts."""

import math
import statistics
from typing import Any

from fedjax_ssl.records.groups import Group
from fedjax_ssl.records.runs import RunRecords
from fedjax_ssl.report.table import LAST, OverSeeds


class Difference(OverSeeds):
    """Differences of pairs, a value each; as text their mean with its sign ± standard error, and how many are above 0.

    Few seeds say little about a normal distribution: the count is what a sign test takes.
    """

    def __str__(self) -> str:
        present = self.present
        if not present:
            return "-"
        error = f" ± {standard_error(present):.2f}" if len(present) > 1 else ""
        return f"{statistics.mean(present):+.2f}{error} ({self._above()} of {len(present)} above 0)"

    def _above(self) -> int:
        return sum(value > 0 for value in self.present)

    def numbers(self) -> dict[str, float | int | None]:
        """Ends of columns' names -> mean, standard error, how many are above 0, and n."""
        present = self.present
        return {
            "": statistics.mean(present) if present else None,
            " standard error": standard_error(present) if len(present) > 1 else None,
            " above 0": self._above(),
            " n": len(present),
        }


def standard_error(values: list[float]) -> float:
    """Of a mean of at least two values."""
    return statistics.stdev(values) / math.sqrt(len(values))


def paired_differences(groups: list[Group], reference: Group) -> list[dict[str, Any]]:
    """The mean over seeds of a run's figure minus that of the reference's run of the same seed, ± its standard error.

    Args:
        groups: to be compared; a seed that the reference does not have is left out.
        reference: the row that the others are seen from.

    Returns:
        A row for each group that shares a seed with the reference, column -> text, number or `Difference`; accuracies
        are percent. What was not measured in both runs of a pair, or on the same set, is '-'.
    """
    by_seed, rows = {run.config["seed"]: run for run in reference.runs}, []
    for group in groups:
        pairs = [(run, by_seed[run.config["seed"]]) for run in group.runs if run.config["seed"] in by_seed]
        if pairs:
            last = f"last {LAST} rounds ({reference.measured})"
            rows.append(
                {
                    "method": group.name,
                    "minus": reference.name,
                    "seeds": len(pairs),
                    "test accuracy": Difference([_difference(tested, *pair) for pair in pairs]),
                    last: Difference([_difference(last_rounds, *pair) for pair in pairs]),
                }
            )
    return rows


def tested(run: RunRecords) -> float | None:
    """The last model's test accuracy; None if it was not measured."""
    return run.tested("test_accuracy")


def last_rounds(run: RunRecords) -> float:
    """The mean accuracy of the last rounds, on the set that is measured each round."""
    return run.accuracy()[-LAST:].mean()


def _difference(figure, run: RunRecords, other: RunRecords) -> float | None:
    """In percent; None where the two runs cannot be compared."""
    if figure is last_rounds and run.measured != other.measured:
        return None
    values = figure(run), figure(other)
    return None if None in values else 100 * (values[0] - values[1])
