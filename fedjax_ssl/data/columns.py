"""Which columns of a table are numbers, which are categories, and which are neither: dates, lists, names."""

import datetime
import sys
from typing import Any

import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data.kinds import table
from fedjax_ssl.data.values import CODE, in_order, is_missing

MOST_CATEGORIES = 100  # of a column; names and identifiers are not categories
FEW_CATEGORIES = 10  # of which each may have few rows; more must have over two rows each on average
MOSTLY = 0.9  # share of a column's values that says what the column is; other values are then mistakes
LEAST_ROWS = 50  # a whole number that differs in each of so many rows may be an identifier
DECIMAL_COMMA = r"[-+]?[\d.]*,\d+"
WITH_UNIT = r"[$€£]\s*[-+\d.]+|[-+\d.]+\s*[%$€£]"
BOUND = r"[<>≤≥]=?\s*[-+]?[\d.]+"
DATE = r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?:[ T].*)?|\d{1,2}[-/]\d{1,2}[-/]\d{2,4}(?: .*)?|\d{1,2}\.\d{1,2}\.\d{4}(?: .*)?"
TIME = r"\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?"
LIST = r"\[.*\]|\{.*\}"


def find_categories(columns: Any, train: np.ndarray, tested: Any, path: str) -> list[list[str] | None]:
    """The categories that each column has in its training rows, in order; None if it is numeric.

    A declared type counts: texts of a parquet file are categories even if they look like numbers. In a csv file a
    column is numeric if all its values are numbers and none has a leading zero, as zip codes have. Prints a warning if
    a column may be an identifier, or has numbers that float32 cannot tell apart.

    Args:
        columns: a DataFrame, see `tables.read_columns`.
        train: the training rows, int [n].
        tested: the test rows, a DataFrame that may lack columns.
        path: the file, for messages.

    Raises:
        UserError: columns are of no use, each with the reason, in one line.
    """
    found, wrong = [], {}
    for name, column in columns.iloc[train].items():
        categories, why = _categories(column)
        of_test = table.as_texts(tested[name]) if name in tested else []
        given = [text for text in of_test if text and not is_missing(text)]
        if not why and given and table.are_missing(table.as_texts(column)).all():
            why = f"has no value in any training row, but {given[0]!r:.40} in a test row"
        found.append(categories)
        if why:
            wrong[name] = why
        elif line := _doubt(column) if categories is None else "":
            print(f"warning: {path}: column {name!r} {line}", file=sys.stderr, flush=True)
    if wrong:
        named = ",".join(f'"{name}"' if "," in name else name for name in wrong)
        lines = "; ".join(f"column {name!r} {why}" for name, why in wrong.items())
        raise UserError(f"{path}: {lines}; to leave out what is no input, say --config.data.ignore_columns={named!r}")
    return found


def _categories(column: Any) -> tuple[list[str] | None, str]:
    """A column's categories, None if it is numeric; and why it is of no use, '' if it is."""
    import pandas  # takes half a second; only tables need it

    api = pandas.api.types
    if api.is_numeric_dtype(column.dtype) and not api.is_bool_dtype(column.dtype):
        wrong = table.as_numbers(column)[1]
        others = column[wrong]
        return None, f"has {others.iloc[0]} in row {others.index[0] + 1}; leave it empty" if wrong.any() else ""
    texts = table.as_texts(column)
    if texts.isna().any():
        value = column[texts.isna()].iloc[0]
        return None, _no_scalar(value, isinstance(value, datetime.date | datetime.time | datetime.timedelta))
    present = texts[~table.are_missing(texts)]
    is_declared = not api.is_object_dtype(column.dtype)
    is_number = table.are_numbers(present)
    others = present[~is_number]
    if not is_declared and not len(others) and not present.str.fullmatch(CODE).any():
        return None, ""
    for form, is_date in ((f"{DATE}|{TIME}", True), (LIST, False)):
        if present.str.fullmatch(form).mean() > MOSTLY:
            return None, _no_scalar(present.iloc[0], is_date)
    if not is_declared and (why := _mixed(others, is_number)):
        return None, why
    names = in_order(present)
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


def _mixed(others: Any, is_number: np.ndarray) -> str:
    """Why a column of numbers and other texts is of no use; '' if it has categories."""
    if not len(others):
        return ""
    row = f"has {others.iloc[0]!r:.40} in row {others.index[0] + 1}"
    if is_number.any() and others.str.fullmatch(BOUND).all():
        return f"is of numbers, but {row} and bounds in {len(others)} rows; write numbers, such as half the bound"
    if is_number.mean() > MOSTLY:
        return f"is of numbers, but {row}; correct it, or leave it empty"
    if others.str.fullmatch(DECIMAL_COMMA).mean() > MOSTLY:
        return f"has numbers with a comma, such as {others.iloc[0]!r:.40}; write 1234.5"
    if others.str.fullmatch(WITH_UNIT).mean() > MOSTLY:
        return f"has numbers with a unit, such as {others.iloc[0]!r:.40}; write the number alone"
    return ""


def _doubt(column: Any) -> str:
    """What may be wrong with a column of numbers; '' if nothing is."""
    values = table.as_numbers(column)[0]
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
