"""Which columns of a table are numbers, which are categories, and which are neither: dates, lists, names."""

import datetime
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjax_ssl.base.errors import UserError, say
from fedjax_ssl.data.kinds.table import Column, as_texts, no_number, read_column
from fedjax_ssl.data.values import DATE, LIST, in_order, same

MOST_CATEGORIES = 100  # of a column; names and identifiers are not categories
FEW_CATEGORIES = 10  # of which each may have few rows; more must have over two rows each on average
MOSTLY = 0.9  # share of a column's values that says what the column is; other values are then mistakes
LEAST_ROWS = 50  # a whole number that differs in each of so many rows may be an identifier
DECIMAL_COMMA = r"[-+]?[\d.]*,\d+"
WITH_UNIT = r"[$€£]\s*[-+\d.]+|[-+\d.]+\s*[%$€£]"
MONTH = r"(?i:(?:\d{1,2}\W+)?(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\W+(?:\d{1,2}\W+)?\d{2,4})"
TIME = r"\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?"


def find_categories(columns: Mapping[str, Column], train: np.ndarray, tested: Any, path: str) -> list[list[str] | None]:
    """The categories that each column has in its training rows, in order; None if it is numeric.

    A declared type counts: texts of a parquet file are categories even if they look like numbers. In a csv file a
    column is numeric if all its values are numbers; 007 is none. Prints a warning if a column may be an identifier, or
    has numbers that float32 cannot tell apart. Raises a UserError if columns are of no use, each with the reason, in
    one line.

    `columns` are those of inputs by name, `train` the training rows, int [n], and `tested` the test rows, a DataFrame
    that may lack columns. Messages begin with `path`.
    """
    found, wrong = [], {}
    for name, column in columns.items():
        column = column.of(train)
        categories, why = _categories(column)
        if not why and column.is_missing.all() and name in tested:
            of_test = read_column(tested[name])
            if not of_test.is_missing.all():
                given = of_test.values[~of_test.is_missing].iloc[0]
                why = f"has no value in any training row, but {given!r:.40} in a test row"
        found.append(categories)
        if why:
            wrong[name] = why
        elif line := _doubt(column.numbers) if categories is None else "":
            say(f"warning: {path}: column {name!r} {line}")
    if wrong:
        named = ",".join(f'"{name}"' if "," in name else name for name in wrong)
        lines = "; ".join(f"column {name!r} {why}" for name, why in wrong.items())
        raise UserError(f"{path}: {lines}; to leave out what is no input, say --config.data.ignore_columns={named!r}")
    return found


def _categories(column: Column) -> tuple[list[str] | None, str]:
    """A column's categories, None if it is numeric; and why it is of no use, '' if it is."""
    import pandas  # takes half a second; only tables need it

    api, values, texts = pandas.api.types, column.values, column.texts
    if texts is None and not api.is_bool_dtype(values.dtype):
        others = values[no_number(column)]
        return None, f"has {others.iloc[0]} in row {others.index[0] + 1}; leave it empty" if len(others) else ""
    if texts is None:
        texts = as_texts(values)
    if texts.isna().any():
        value = values[texts.isna()].iloc[0]
        return None, _no_scalar(value, isinstance(value, datetime.date | datetime.time | datetime.timedelta))
    is_declared = not api.is_object_dtype(values.dtype)
    present = texts[~column.is_missing]
    numbers = column.numbers[~column.is_missing]
    others = present[np.isnan(numbers)]
    if not is_declared and not len(others):
        return None, ""
    for form, is_date in ((f"{DATE}|{MONTH}|{TIME}", True), (LIST, False)):
        if present.str.fullmatch(form).mean() > MOSTLY:
            return None, _no_scalar(present.iloc[0], is_date)
    if not is_declared and (why := _mixed(others, numbers)):
        return None, why
    names = in_order(map(same, present))
    if len(names) > MOST_CATEGORIES or (len(names) > FEW_CATEGORIES and 2 * len(names) >= len(present)):
        why = f"has {len(names)} different texts in {len(present)} rows, so they are no categories"
        if is_declared and not len(others):
            return None, f"{why}; save it as numbers, since the file declares it as texts"
        return None, f"{why}; if the rows are texts, name it in data.text_column"
    return list(names), ""


def _no_scalar(value: Any, is_date: bool) -> str:
    """Why a column of dates or lists is of no use."""
    what, instead = "lists", "give each of their numbers a column"
    if is_date:
        what, instead = "dates or times", "make numbers of them, such as days since a date"
    return f"has {what}, such as {str(value)!r:.40}; {instead}"


def _mixed(others: Any, numbers: np.ndarray) -> str:
    """Why a column of numbers, NaN for the `others`, which are texts, is of no use; '' if it has categories."""
    values = numbers[~np.isnan(numbers)]
    enough = 0 if others.str.match("[<>≤≥]").all() else MOSTLY if len(np.unique(values)) <= FEW_CATEGORIES else 0.5
    if len(values) > enough * len(numbers):
        row = f"{others.iloc[0]!r:.40} in row {others.index[0] + 1}, and texts in {len(others)} rows"
        code = "; or write a letter before each, if they are codes"
        return f"is of numbers, but has {row}; write numbers, or leave them empty{code}"
    if others.str.fullmatch(DECIMAL_COMMA).mean() > MOSTLY:
        return f"has numbers with a comma, such as {others.iloc[0]!r:.40}; write 1234.5"
    if others.str.fullmatch(WITH_UNIT).mean() > MOSTLY:
        return f"has numbers with a unit, such as {others.iloc[0]!r:.40}; write the number alone"
    return ""


def _doubt(values: np.ndarray) -> str:
    """What may be wrong with a column of numbers, NaN if missing; '' if nothing is."""
    values = values[~np.isnan(values)]
    least, most = values.min(initial=np.inf), values.max(initial=-np.inf)
    with np.errstate(over="ignore", invalid="ignore"):
        apart = float(np.spacing(np.float32(max(-least, most))))
    if least < most < least + 32 * apart:
        line = f"has numbers from {least:.15g} to {most:.15g}, where those of float32 are {apart:g} apart"
        return f"{line}; subtract a constant"
    if len(values) >= LEAST_ROWS and (values == np.round(values)).all() and len(np.unique(values)) == len(values):
        line = f"has another whole number in each of {len(values)} rows"
        return f"{line}; if it numbers or names them, leave it out by data.ignore_columns"
    return ""
