"""Loads a user's csv or parquet file as a data set: rows of numbers and categories, or texts.

An empty label means that there is none. Every problem in a file gives a one-line error that names the file, the column
and the row.
"""

import csv
import io
import pathlib
import re
import sys
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from fedjax_ssl.base.errors import UserError, first_line, known_are
from fedjax_ssl.data.arrays import existing_path
from fedjax_ssl.data.kinds import table, text

MOST_CATEGORIES = 100  # of a column; names and identifiers are not categories
MOSTLY_NUMBERS = 0.9  # share of numbers above which a column counts as numeric, and other fields as mistakes
AMBIGUOUS = ("na", "n/a", "null", "none")  # words of `table.MISSING` that may also name a class
DECIMAL_COMMA = r"[-+]?[\d.]*,\d+"
WHOLE = re.compile(r"-?\d{1,999}")
TEST_EVERY = 5  # without a test file, every fifth labelled row of a class is for testing


def read_columns(path: str, field: str) -> Any:
    """Reads a csv, tsv or parquet file into a DataFrame of texts; a missing value is ''.

    A parquet file's floats are whole numbers if all in their column are: a column of these with a missing value is
    often saved as floats.

    Args:
        path: the file. A csv is UTF-8 with a header; fields are separated by commas, semicolons or tabs. A first
            column without a name, in which pandas numbers the rows, is left out.
        field: the configuration field that gives the path, for messages.

    Raises:
        UserError: the file is missing, has another format, has rows of different lengths, or another column without a
            name.
    """
    import pandas  # takes half a second; only tables and texts need it

    file = existing_path(path, field, "file", "a csv or parquet file")
    is_parquet = file.suffix == ".parquet"
    try:
        if is_parquet:
            frame = pandas.read_parquet(file).convert_dtypes()
            frame = frame.astype(object).where(frame.notna(), "").astype(str).rename(columns=str)
        else:
            header, rows = _read_csv(file)
            frame = pandas.DataFrame(rows, columns=header, dtype=str).drop(columns="", errors="ignore")
        if not len(frame):
            raise ValueError("it has no rows")
    except Exception as error:  # The errors of pyarrow and pandas have no common base.
        form = "parquet" if is_parquet else "csv in UTF-8"
        raise UserError(f"{path} cannot be read as {form} ({first_line(error)})") from error
    return frame


def _read_csv(file: pathlib.Path) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of a csv file. Not by pandas' own reader, which fills up rows that are too short."""
    lines = file.read_text(encoding="utf-8-sig").lstrip("\r\n")
    delimiter = max(",;\t", key=lines.partition("\n")[0].count)
    header, *rows = list(csv.reader(io.StringIO(lines, newline=""), delimiter=delimiter, strict=True)) or [[]]
    header = [name.strip() for name in header]
    # In a file with one column a blank line is a missing value; otherwise it is not a row.
    rows = [row or [""] for row in rows if row or len(header) == 1]
    for place, name in enumerate(header):
        if name in header[:place] or (place and not name):
            raise ValueError(f"column {place + 1} has {f'the name {name!r} of another' if name else 'no name'}")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise ValueError(f"row {number} has {len(row)} fields, the header {len(header)}")
    return header, rows


def load_table(config: Any) -> dict[str, Any]:
    """Loads the data set in a csv or parquet file.

    Args:
        config: the `data` section. It reads `path`, `test_path`, `label_column`, `client_column`, `ignore_columns`,
            `text_column`, `text_length`, `vocabulary` and `weak_views`.

    Returns:
        The fields of `Dataset` except the name. Labels are sorted by name, or as numbers if all are whole numbers. A
        training row with an empty label gets -1; a test row with an empty label is left out. Without a test file every
        fifth labelled row of each class, in the file's order, is for testing. Clients are numbered in the order of
        their names.

    Raises:
        UserError: a file or a column is invalid.
    """
    path, label = config.path, config.label_column
    columns = read_columns(path, "data.path")
    check_column(columns, label, "label_column", path)
    for field in ("client_column", "text_column"):
        check_column(columns, config[field], field, path, optional=True)
    listed = csv.reader(io.StringIO(config.ignore_columns), skipinitialspace=True)
    ignored = [name.strip() for line in listed for name in line if name.strip()]
    for name in ignored:
        check_column(columns, name, "ignore_columns", path)
    names = [name for name in columns if name not in (label, config.client_column, *ignored)]
    class_names = find_class_names(columns[label].tolist(), path, label)
    labels = codes(columns[label], class_names)
    train, test = np.arange(len(labels)), for_test(labels)
    tested, where = columns, path
    if config.test_path:
        tested, where = read_columns(config.test_path, "data.test_path"), config.test_path
        check_column(tested, label, "label_column", where)
        test_labels = known_codes(tested[label], class_names, where, label)
        test = np.flatnonzero(test_labels >= 0)
        if not len(test):
            raise UserError(f"{where} has no row with a label")
    elif not len(test):
        raise UserError(f"{path} has no class with two labelled rows, so none is for testing; give data.test_path")
    else:
        test_labels, train = labels, np.setdiff1d(train, test)
    if config.text_column:
        made = _texts(config, columns, tested, train, test, where)
    else:
        made = _rows(columns[names], tested, train, test, path, where)
    details = {**made.pop("details"), "label_column": label}
    owners = None
    if config.client_column:
        owners = find_owners(columns[config.client_column].tolist(), train, path, config.client_column)
    return {
        **made,
        "y_train": labels[train],
        "y_test": test_labels[test],
        "num_classes": len(class_names),
        "class_names": tuple(class_names),
        "details": details,
        "owners": owners,
    }


def check_column(columns: Collection[str], name: str, field: str, path: str, optional: bool = False) -> None:
    if not name and optional:
        return
    if name not in columns:
        what = f"data.{field} is empty" if not name else f"{path} has no column {name!r} (data.{field})"
        raise UserError(f"{what}{known_are(name, columns)}")


def sorted_names(names: set[str]) -> list[str]:
    """Sorted as numbers if all are whole numbers, else alphabetically."""
    is_number = all(map(WHOLE.fullmatch, names))
    return sorted(names, key=(lambda name: (int(name), name)) if is_number else None)


def refuse_ambiguous(labels: Sequence[str], path: str, column: str) -> None:
    """Raises a UserError if a label may be either the name of a class or a missing label."""
    for row, label in enumerate(labels, start=1):
        if label.strip().lower() in AMBIGUOUS:
            raise UserError(
                f"{path}: {label!r} in row {row} may be a class or a missing label (data.label_column={column!r}); "
                "leave the field empty if the row has no label, or give the class another name"
            )


def check_classes(names: Sequence[str], path: str, column: str) -> None:
    if len(names) < 2:
        has = f"the only class is {names[0]!r}" if names else "all labels are empty"
        raise UserError(f"{path}: {has} (data.label_column={column!r}); a classifier needs at least 2 classes")


def find_class_names(labels: Sequence[str], path: str, column: str) -> list[str]:
    refuse_ambiguous(labels, path, column)
    names = sorted_names({label.strip() for label in labels if not table.is_missing(label)})
    check_classes(names, path, column)
    fraction = next((name for name in names if not WHOLE.fullmatch(name.removesuffix(".0"))), None)
    if fraction and np.isfinite(table.numbers(names)).all() and len(names) > max(MOST_CATEGORIES, len(labels) // 10):
        raise UserError(
            f"{path}: column {column!r} has {len(names)} different numbers, such as {fraction!r}, in {len(labels)} "
            "rows; classes are texts or whole numbers: divide the numbers into ranges"
        )
    return names


def codes(values: Sequence[str], names: list[str]) -> np.ndarray:
    """The position of each value in `names`, or -1: int32 [N]."""
    found = {name: code for code, name in enumerate(names)}
    return np.array([found.get(value, found.get(value.strip(), -1)) for value in values], np.int32)


def known_codes(labels: Sequence[str], names: list[str], path: str, column: str) -> np.ndarray:
    """The `codes` of test labels, -1 for missing labels; raises a UserError for a label that training lacks."""
    found = codes(labels, names)
    others = ["" if code >= 0 else label for label, code in zip(labels, found)]
    refuse_ambiguous(others, path, column)
    unknown = [label for label in others if not table.is_missing(label)]
    if unknown:
        raise UserError(f"{path} has the label {unknown[0]!r}{known_are(unknown[0], names)}")
    return found


def find_owners(values: Sequence[str], train: np.ndarray, path: str, column: str) -> np.ndarray:
    """The client of each training row, int32 [n]; clients are numbered in the order of their names.

    Only names with a training row are clients.

    Args:
        values: the column with the clients' names, for all rows [N].
        train: the training rows, int [n].
        path: the file, for messages.
        column: the column's name, for messages.

    Raises:
        UserError: a row names no client.
    """
    for row, value in enumerate(values, start=1):
        if table.is_missing(value):
            raise UserError(f"{path}: {value!r} in row {row} names no client (data.client_column={column!r})")
    names = [values[row].strip() for row in train]
    return codes(names, sorted_names(set(names)))


def for_test(labels: np.ndarray) -> np.ndarray:
    """Every fifth labelled row of each class, from the first on; none if the class has only one: int [T], ascending."""
    of_classes = [np.flatnonzero(labels == label) for label in range(labels.max() + 1)]
    return np.sort(np.concatenate([np.zeros(0, int), *(rows[::TEST_EVERY] for rows in of_classes if len(rows) > 1)]))


def _rows(columns: Any, tested: Any, train: np.ndarray, test: np.ndarray, path: str, where: str) -> dict[str, Any]:
    """Encodes rows of numbers and categories; categories, means and deviations come from the training rows."""
    if not len(columns.columns):
        raise UserError(f"{path} has no column but the label's, the clients' and those left out")
    categories = []
    for name, column in columns.iloc[train].items():
        of_test = tested[name].iloc[test] if name in tested else column[:0]
        given = of_test[~table.are_missing(of_test)]
        if len(given) and table.are_missing(column).all():
            raise UserError(
                f"{path}: column {name!r} has no value in any training row, but {given.iloc[0]!r:.40} in a test row; "
                "name it in data.ignore_columns"
            )
        categories.append(_categories(name, column, path))
    facts = {"columns": list(columns), "categories": categories}
    x_train, x_test = table.encode(columns, facts, path)[train], table.encode(tested, facts, where)[test]
    return {"kind": "table", **encoded(x_train, x_test, facts)}


def encoded(x_train: np.ndarray, x_test: np.ndarray, facts: dict[str, Any]) -> dict[str, Any]:
    """A table's arrays, with means and deviations of the numbers in its training rows."""
    values = np.where(np.isfinite(x_train), x_train, np.nan).astype(np.float64)
    of_numbers = np.array([names is None for names in facts["categories"]]) & np.isfinite(values).any(axis=0)
    mean, std = np.zeros(values.shape[1]), np.ones(values.shape[1])
    mean[of_numbers], std[of_numbers] = np.nanmean(values[:, of_numbers], 0), np.nanstd(values[:, of_numbers], 0)
    std[std == 0] = 1.0
    return {
        "x_train": x_train,
        "x_test": x_test,
        "mean": tuple(mean.tolist()),
        "std": tuple(std.tolist()),
        "details": facts,
    }


def _categories(name: str, column: Any, path: str) -> list[str] | None:
    """The categories that a column has in its training rows, sorted; None if it is numeric.

    Prints a warning if its numbers differ by little more than the distance of neighbouring numbers in float32.

    Raises:
        UserError: it is mostly numeric, has decimal commas, or has too many categories.
    """
    present = column[~table.are_missing(column)].str.strip()
    numbers = table.numbers(present)
    others = present[~np.isfinite(numbers)]
    if not len(others):
        least, most = numbers.min(initial=np.inf), numbers.max(initial=-np.inf)
        with np.errstate(over="ignore", invalid="ignore"):  # `table.encode` refuses numbers that float32 cannot hold
            apart = float(np.spacing(np.float32(max(-least, most))))
        if least < most < least + 32 * apart:
            line = f"numbers from {least:.15g} to {most:.15g}, where those of float32 are {apart:g} apart"
            print(f"warning: {path}: column {name!r} has {line}; subtract a constant", file=sys.stderr, flush=True)
        return None
    if len(others) < (1 - MOSTLY_NUMBERS) * len(present):
        row = others.index[0] + 1
        raise UserError(f"{path}: column {name!r} is of numbers, but has {others.iloc[0]!r:.40} in row {row}")
    if others.str.fullmatch(DECIMAL_COMMA).mean() > MOSTLY_NUMBERS:
        raise UserError(
            f"{path}: column {name!r} has numbers with a comma, such as {others.iloc[0]!r:.40}; write 1234.5"
        )
    names = sorted_names(set(present))
    if len(names) > MOST_CATEGORIES:
        raise UserError(
            f"{path}: column {name!r} has {len(names)} different texts, at most {MOST_CATEGORIES} are categories; name "
            "it in data.text_column, or in data.ignore_columns"
        )
    return names


def _texts(config: Any, columns: Any, tested: Any, train: np.ndarray, test: np.ndarray, where: str) -> dict[str, Any]:
    """Tokenises texts with the vocabulary of the training texts."""
    name = config.text_column
    check_column(tested, name, "text_column", where)
    of_train, of_test = columns[name].iloc[train], tested[name].iloc[test]
    vocabulary = text.make_vocabulary(of_train, config.vocabulary)
    if not vocabulary:
        raise UserError(f"{config.path}: column {name!r} has no word")
    x_train, x_test = (text.tokenise(part, vocabulary, config.text_length) for part in (of_train, of_test))
    details = {"vocabulary": vocabulary, "text_column": name}
    return as_texts(x_train, x_test, len(vocabulary) + text.FIRST_WORD, config.weak_views, details)


def as_texts(
    x_train: np.ndarray, x_test: np.ndarray, num_tokens: int, weak_views: int, details: dict[str, Any]
) -> dict[str, Any]:
    """The fields of a data set of texts."""
    facts = {
        "shape": list(x_train.shape[1:]), "weak_views": checked_views(weak_views, x_train), "num_tokens": num_tokens,
    }  # fmt: skip
    return {
        "kind": "text", "x_train": x_train, "x_test": x_test, "mean": (), "std": (), "details": {**facts, **details},
    }  # fmt: skip


def checked_views(weak_views: int, x_train: np.ndarray) -> int:
    """Returns `data.weak_views`; raises a UserError if the examples have fewer views."""
    number = x_train.shape[1] if x_train.ndim == 3 else 1
    if weak_views > number:
        raise UserError(f"data.weak_views={weak_views}, but each example has {number} view{'s' * (number > 1)}")
    return weak_views
