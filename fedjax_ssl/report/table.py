"""The table of several runs: mean and spread over seeds, rounds and bytes to an accuracy; Markdown, CSV and LaTeX."""

import csv
import io
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from fedjax_ssl.records.runs import RunRecords

LAST = 5  # rounds: their mean says more than the last one if accuracies jump
REVEALED = "labels revealed"  # how a bound that sees the clients' labels is marked


class Row(NamedTuple):
    """Runs that differ in nothing but the seed.

    Attributes:
        name: of the method, say.
        values: the other columns that tell it from other rows.
        runs: those that are finished.
        num_seeds: how many are planned.
        labels_revealed: whether they are bounds that see the clients' labels.
    """

    name: str
    values: Mapping[str, Any]
    runs: list[RunRecords]
    num_seeds: int
    labels_revealed: bool


def make_table(rows: list[Row], target: float) -> list[dict[str, Any]]:
    """The figures of each row, column -> text.

    Accuracies are percent, mean ± standard deviation over the seeds. The test accuracy is the last model's, and so are
    the other measures of the test set that a run has; those that none has make no column. The last
    rounds, the best and the target are of the set that runs measure each round: columns of validation accuracies say
    so, and where some rows measure validation images and others the test set, each set has columns of its own. Rounds
    and bytes to the target are means over the seeds that reached it, with their number if not all did; so is the test
    accuracy of runs with validation images, which have none before their end. Bytes are of one run, both ways for all
    clients; seconds are those of its rounds, without compiling.

    Args:
        rows: of the table.
        target: accuracy on the set that is measured each round, a share.
    """
    sets = sorted({run.measured for row in rows for run in row.runs}) or ["test"]
    measures = {name: words for row in rows for run in row.runs for name, words in run.measures().items()}
    table = []
    for row in rows:
        by_round = {}
        for measured in sets:
            by_round |= _columns_by_round(row, measured, "" if sets == ["test"] else f" ({measured})", target)
        unfinished = [run for run in row.runs if not run.is_finished]
        table.append(
            {
                "method": f"{row.name} ({REVEALED})" if row.labels_revealed else row.name,
                **row.values,
                "seeds": f"{len(row.runs)} of {row.num_seeds}"
                + (f" ({len(unfinished)} unfinished)" if unfinished else ""),
                "test accuracy": _tested(row.runs, "accuracy"),
                **{f"test {words}": _tested(row.runs, name) for name, words in measures.items()},
                **by_round,
                "MB down": mean([sum(run.values("bytes_down")) / 1e6 for run in row.runs]),
                "MB up": mean([sum(run.values("bytes_up")) / 1e6 for run in row.runs]),
                "seconds": mean([run.seconds() for run in row.runs]),
            }
        )
    return table


def _tested(runs: list[RunRecords], name: str) -> str:
    """The last models' figure on the test set in percent, over the seeds that have it, with their number if not all."""
    tested = [run.tested(f"test_{name}") for run in runs]
    present = [100 * share for share in tested if share is not None]
    return mean_and_spread(present) + (f" ({len(present)} of {len(tested)})" if 0 < len(present) < len(tested) else "")


def _columns_by_round(row: Row, measured: str, of: str, target: float) -> dict[str, str]:
    """The columns of what is measured each round, of a row's runs that measure this set.

    Args:
        row: of the table.
        measured: the set, 'test' or 'validation'.
        of: what the columns' names say of it.
        target: accuracy, a share.
    """
    runs, percent = [run for run in row.runs if run.measured == measured], f"{100 * target:g} %"
    reached = [rounds_to(run, target) for run in runs]
    return {
        f"last {LAST} rounds{of}": mean_and_spread([100 * run.accuracy()[-LAST:].mean() for run in runs]),
        f"best{of}": mean_and_spread([100 * run.best()[0] for run in runs]),
        f"rounds to {percent}{of}": of_those_that_did(reached),
        f"MB to {percent}{of}": of_those_that_did(
            [rounds and megabytes(run, rounds) for run, rounds in zip(runs, reached)]
        ),
    }


def to_markdown(table: list[dict[str, Any]]) -> str:
    """As a Markdown table."""
    columns = list(table[0])
    lines = [columns, ["---"] * len(columns), *(list(row.values()) for row in table)]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def to_csv(table: list[dict[str, Any]]) -> str:
    """As comma-separated values."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def to_latex(table: list[dict[str, Any]]) -> str:
    """As a LaTeX tabular, with the rules of the package booktabs."""
    columns = list(table[0])
    lines = [" & ".join(_latex(cell) for cell in row) + r" \\" for row in (columns, *(row.values() for row in table))]
    head, *body = lines
    inside = "\n".join([r"\toprule", head, r"\midrule", *body, r"\bottomrule"])
    return f"\\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}\n{inside}\n\\end{{tabular}}\n"


def rounds_to(run: RunRecords, target: float) -> int | None:
    """The first round with the target's accuracy on the set that is measured each round; None if no round has it."""
    return next((line["round"] for line, value in zip(run.metrics, run.accuracy()) if value >= target), None)


def megabytes(run: RunRecords, rounds: int) -> float:
    """Bytes that travelled both ways in the first so many rounds."""
    return sum(line["bytes_down"] + line["bytes_up"] for line in run.metrics[:rounds]) / 1e6


def of_those_that_did(values: list[float | None]) -> str:
    """The mean over the seeds that have a value, and their number if not all have one."""
    present = [value for value in values if value is not None]
    if not present:
        return "-"
    share = "" if len(present) == len(values) else f" ({len(present)} of {len(values)})"
    return f"{mean(present)}{share}"


def mean(values: list[float]) -> str:
    """To four digits; '-' for None."""
    return f"{statistics.mean(values):.4g}" if values else "-"


def mean_and_spread(values: list[float]) -> str:
    """Mean ± standard deviation; a single value has no spread."""
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


_LATEX = {"\\": r"\textbackslash{}", "±": r"$\pm$", **{letter: f"\\{letter}" for letter in "&%$#_{}"},
          "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}  # fmt: skip


def _latex(cell: Any) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in str(cell))
