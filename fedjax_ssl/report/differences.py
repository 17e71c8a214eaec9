"""Differences from a reference row, paired by seed: runs of a seed share partition, initialisation and cohorts."""

import math
import statistics
from typing import Any

from fedjax_ssl.records.groups import Group
from fedjax_ssl.records.runs import RunRecords
from fedjax_ssl.report.table import LAST, OverSeeds


class Difference(OverSeeds):
    """Differences, one for each pair; as text their signed mean ± standard error, and how many are above 0.

    A few seeds cannot show a normal distribution, so the count is given for a sign test.
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
        """Suffixes of the column's name -> mean, standard error, how many are above 0, and n."""
        present = self.present
        return {
            "": statistics.mean(present) if present else None,
            " standard error": standard_error(present) if len(present) > 1 else None,
            " above 0": self._above(),
            " n": len(present),
        }


def standard_error(values: list[float]) -> float:
    """The standard error of the mean of at least two values."""
    return statistics.stdev(values) / math.sqrt(len(values))


def paired_differences(groups: list[Group], reference: Group) -> list[dict[str, Any]]:
    """Means over seeds of a run's figure minus that of the reference's run with the same seed.

    Args:
        groups: to be compared; seeds that the reference does not have are left out.
        reference: the row that is subtracted.

    Returns:
        A row for each group that shares a seed with the reference, column -> text, number or `Difference`; accuracies
        are percent. '-' if no pair measured the figure in both runs, on the same set.
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
    """The difference in percent; None if the two runs cannot be compared."""
    held_out = [each.config["data"]["validation"] for each in (run, other)]
    if figure is last_rounds and held_out[0] != held_out[1]:
        return None
    values = figure(run), figure(other)
    return None if None in values else 100 * (values[0] - values[1])
