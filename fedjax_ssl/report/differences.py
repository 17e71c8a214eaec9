"""Differences from a reference row, paired by seed: runs of a seed share partition, initialisation and cohorts."""

from typing import Any

from fedjax_ssl.records.groups import Group
from fedjax_ssl.records.runs import RunRecords
from fedjax_ssl.report.table import ERROR, LAST, OverSeeds


def paired_differences(groups: list[Group], reference: Group) -> list[dict[str, Any]]:
    """Means over seeds of a run's figure minus that of the reference's run with the same seed.

    Args:
        groups: to be compared; seeds that the reference does not have are left out.
        reference: the row that is subtracted.

    Returns:
        A row for each group that shares a seed with the reference, column -> text, number or `OverSeeds`; accuracies
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
                    "test accuracy": OverSeeds([_of_tests(*pair) for pair in pairs], spread=ERROR),
                    last: OverSeeds([_of_rounds(*pair) for pair in pairs], spread=ERROR),
                }
            )
    return rows


def _of_tests(run: RunRecords, other: RunRecords) -> float | None:
    """The difference in percent between last models on the test set; None if one was not measured."""
    values = run.tested("test_accuracy"), other.tested("test_accuracy")
    return None if None in values else 100 * (values[0] - values[1])


def _of_rounds(run: RunRecords, other: RunRecords) -> float | None:
    """The difference in percent between means of the last rounds; None if they are on different images."""
    if run.config["data"]["validation"] != other.config["data"]["validation"]:
        return None
    return 100 * (run.accuracy()[-LAST:].mean() - other.accuracy()[-LAST:].mean())
