"""How a table is shown: columns, intervals, bold best values; as Markdown, CSV and LaTeX, and in files."""

import math
import pathlib
import re
import statistics
from collections.abc import Collection
from typing import Any, NamedTuple

from fedjax_ssl.base.errors import UserError, known_are
from fedjax_ssl.base.files import as_csv, replace_file
from fedjax_ssl.report.table import INTERVAL, REVEALED, OverSeeds, Row, half_interval, make_runs_table, make_table

LOW_IS_GOOD = "spread over clients"  # part of the names of columns in which lower is better


class Look(NamedTuple):
    """How a table is shown in Markdown, LaTeX and on a page; its CSV has every column and number."""

    columns: tuple[str, ...] = ()  # the shown columns, in this order; (): all
    # Whether figures over seeds are mean ± half of their confidence interval, instead of the standard deviation.
    interval: bool = False
    caption: str = ""  # of the LaTeX table, in LaTeX
    label: str = ""  # of the LaTeX table

    def of(self, table: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The table's chosen columns. Raises UserError if there is no such column."""
        known = list(table[0])
        for name in self.columns:
            if name not in known:
                raise UserError(f"the table has no column {name!r}{known_are(name, known)}")
        return [{name: self._cell(row[name]) for name in self.columns or known} for row in table]

    def _cell(self, cell: Any) -> Any:
        is_share = isinstance(cell, OverSeeds) and cell.is_share
        return cell._replace(spread=INTERVAL) if self.interval and is_share else cell


PLAIN = Look()


def best_cells(table: list[dict[str, Any]]) -> set[tuple[int, str]]:
    """(row, column) of each accuracy that is the best, or whose difference from the best may be due to chance.

    That is, the confidence interval of the differences, paired by seed, contains 0. Rows are compared if they have the
    same data set and, in a sweep, the same values in the columns `data.*`. Upper bounds that see the clients' labels
    are left out. So is a column in which no row is significantly worse, as often with three seeds and always with one:
    bold would say nothing there.
    """
    of_data = [name for name in table[0] if name == "data set" or name.startswith("data.")]
    alike: dict[tuple[Any, ...], list[int]] = {}
    for number, row in enumerate(table):
        if not str(row["method"]).endswith(f"({REVEALED})"):
            alike.setdefault(tuple(row[name] for name in of_data), []).append(number)
    return set().union(*(_best_of(table, rows) for rows in alike.values()))


def _best_of(table: list[dict[str, Any]], rows: list[int]) -> set[tuple[int, str]]:
    """The part of `best_cells` in some rows, which are compared with each other."""
    found: set[tuple[int, str]] = set()
    for name in table[0]:
        sign = -1.0 if LOW_IS_GOOD in name else 1.0
        cells = {number: table[number][name] for number in rows if isinstance(table[number][name], OverSeeds)}
        by_seed = {
            number: {seed: sign * value for seed, value in zip(cell.seeds, cell.values) if value is not None}
            for number, cell in cells.items()
            if cell.is_share and cell.present and all(map(math.isfinite, cell.present))
        }
        if len(by_seed) < 2:
            continue
        best = max(by_seed, key=lambda number: statistics.mean(by_seed[number].values()))
        bold, worse = {best}, False
        for number, own in by_seed.items():
            apart = [by_seed[best][seed] - own[seed] for seed in own if seed in by_seed[best]]
            if len(apart) > 1 and number != best:
                is_worse = statistics.mean(apart) > half_interval(apart)
                worse |= is_worse
                bold |= set() if is_worse else {number}
        found |= {(number, name) for number in bold if worse}
    return found


def write_tables(path: pathlib.Path, rows: list[Row], target: float, look: Look = PLAIN) -> list[dict[str, Any]]:
    """Writes PATH.csv, PATH.md, PATH.tex, and PATH_runs.csv with a line for each run; returns the table of the rows.

    `path` has no suffix; the rest as for `make_table`. Raises OSError if a file cannot be written, and UserError if
    `look` names a column that the table does not have.
    """
    table = make_table(rows, target)
    write_table(path, table, look)
    replace_file(path.with_name(f"{path.name}_runs.csv"), to_csv(make_runs_table(rows, target)))
    return table


def write_table(path: pathlib.Path, table: list[dict[str, Any]], look: Look = PLAIN) -> None:
    """Writes one table as PATH.csv, in numbers, PATH.md and PATH.tex, in which the best accuracies are bold."""
    shown, bold = look.of(table), best_cells(table)
    latex = to_latex(shown, bold, look.caption, look.label)
    for suffix, text in {"csv": to_csv(table), "md": to_markdown(shown, bold), "tex": latex}.items():
        replace_file(path.with_name(f"{path.name}.{suffix}"), text)


def to_markdown(table: list[dict[str, Any]], bold: Collection[tuple[int, str]] = ()) -> str:
    """Formats a table as Markdown; `bold` are the cells (row, column) in bold letters."""
    columns = list(table[0])
    body = [
        [f"**{cell}**" if (number, name) in bold else cell for name, cell in row.items()]
        for number, row in enumerate(table)
    ]
    lines = [[str(cell).replace("|", r"\|") for cell in line] for line in (columns, ["---"] * len(columns), *body)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def to_csv(table: list[dict[str, Any]]) -> str:
    """Formats a table as CSV: a cell over seeds becomes several columns of numbers; missing values are empty."""
    lines = [
        {
            f"{name}{end}": value
            for name, cell in row.items()
            for end, value in (cell.numbers() if hasattr(cell, "numbers") else {"": cell}).items()
        }
        for row in table
    ]
    return as_csv(lines)


def _angles(text: str) -> str:
    """LaTeX for < and >, which would be inverted question marks in its default encoding."""
    return text.replace("<", r"\textless{}").replace(">", r"\textgreater{}")


def to_latex(
    table: list[dict[str, Any]], bold: Collection[tuple[int, str]] = (), caption: str = "", label: str = ""
) -> str:
    """Formats a table as LaTeX tabular with booktabs rules; with a caption or a label, inside a table environment."""
    import pandas

    frame = pandas.DataFrame([{name: str(cell) for name, cell in row.items()} for row in table])
    style = frame.style.hide(axis="index").format(_angles, escape="latex")
    style = style.format_index(_angles, escape="latex", axis="columns")
    for number, name in (cell for cell in bold if cell[1] in frame):
        style.set_properties(([number], [name]), textbf="--rwrap")
    kind, place = "l" + "r" * (len(frame.columns) - 1), "centering" if caption or label else None
    around = {"position_float": place, "caption": caption or None, "label": label or None}
    text = style.to_latex(hrules=True, column_format=kind, **around)
    # After the \\ of the previous line, a star or a bracket would be read as its argument.
    return re.sub(r"^(?=[*\[])", "{}", text, flags=re.MULTILINE)
