"""The table of a sweep, as Markdown and CSV, from the records in the runs' folders."""

import csv
import io
import json
import pathlib
import statistics
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from fedjax_ssl.files import replace_file
from fedjax_ssl.workdir import METRICS, SUMMARY, read_lines

REVEALED = "labels revealed"  # how a bound that sees the clients' labels is marked


class Cell(NamedTuple):
    """One row of the table: a method with one combination of values.

    Attributes:
        name: of the row.
        grid: field -> value.
        config: the configuration, but for its seed.
        folder: holds seed_N.
        seeds: all that belong to it.
    """

    name: str
    grid: dict[str, Any]
    config: ConfigDict
    folder: pathlib.Path
    seeds: tuple[int, ...]

    def title(self) -> str:
        """Name and values."""
        return ", ".join([self.name, *(f"{field} {value}" for field, value in self.grid.items())])


def write_table(workdir: pathlib.Path, sweep, cells: list[Cell]) -> str:
    """Replaces WORKDIR/table.md and table.csv by what the finished runs say; returns the Markdown.

    Accuracies are percent, mean ± standard deviation over the finished seeds. Rounds to the target are those of the
    seeds that reached it, and how many did. Bytes are of one run; seconds too, compilation left out.
    """
    rows = [row_of(cell, sweep.target_accuracy) for cell in cells]
    columns = list(rows[0])
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    lines = [columns, ["---"] * len(columns), *(list(row.values()) for row in rows)]
    markdown = "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
    workdir.mkdir(parents=True, exist_ok=True)
    replace_file(workdir / "table.csv", text.getvalue())
    replace_file(workdir / "table.md", markdown)
    return markdown


def row_of(cell: Cell, target: float) -> dict[str, Any]:
    """A cell's figures; '-' where no run is finished."""
    folders = [cell.folder / f"seed_{seed}" for seed in cell.seeds]
    folders = [folder for folder in folders if (folder / SUMMARY).exists()]
    summaries = [json.loads((folder / SUMMARY).read_text()) for folder in folders]
    reached = [rounds_to(folder, target) for folder in folders]
    marked = cell.config.data.reveal_labels or cell.config.data.centralised

    def mean(name: str, unit: float) -> str:
        return f"{statistics.mean(s[name] for s in summaries) / unit:.4g}" if summaries else "-"

    return {
        "method": f"{cell.name} ({REVEALED})" if marked else cell.name,
        **cell.grid,
        "seeds": f"{len(folders)} of {len(cell.seeds)}",
        "test accuracy": mean_and_spread([100 * s["test_accuracy"] for s in summaries]),
        "best": mean_and_spread([100 * s["best_test_accuracy"] for s in summaries]),
        f"rounds to {100 * target:g} %": rounds_text(reached),
        "MB down": mean("bytes_down", 1e6),
        "MB up": mean("bytes_up", 1e6),
        "seconds": mean("seconds", 1),
    }


def rounds_to(folder: pathlib.Path, target: float) -> int | None:
    """The first round with the target's test accuracy; None if there is none."""
    return next((line["round"] for line in read_lines(folder / METRICS) if line["test_accuracy"] >= target), None)


def rounds_text(reached: list[int | None]) -> str:
    """Mean over the seeds that reached the target, and how many did if not all."""
    there = [rounds for rounds in reached if rounds is not None]
    if not there:
        return "-"
    share = "" if len(there) == len(reached) else f" ({len(there)} of {len(reached)})"
    return f"{statistics.mean(there):.1f}{share}"


def mean_and_spread(values: list[float]) -> str:
    """Mean ± standard deviation; a single value has no spread."""
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"
