"""Loads a user's csv or parquet file as a data set: rows of numbers and categories, or texts.

Every problem in a file gives a one-line error that names the file, the column and the row.
"""

import csv
import io
import itertools
import pathlib
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.base.errors import UserError, errors_of, first_line, known_are
from fedjax_ssl.data.arrays import existing_path
from fedjax_ssl.data.columns import find_categories
from fedjax_ssl.data.kinds import table
from fedjax_ssl.data.kinds.tokenizer import make_tokenizer, num_tokens, tokenise
from fedjax_ssl.data.labels import divide, read_labels
from fedjax_ssl.data.owners import read_names, read_owners

DELIMITERS = "\t;,"
PARQUET = ".parquet"
TRIED = 100  # rows that must have as many fields as the header


def read_columns(path: str, field: str) -> Any:
    """Reads a csv, tsv or parquet file into a DataFrame.

    A csv is UTF-8 with a header; fields are separated by commas, semicolons or tabs. A first column without a name, in
    which pandas numbers the rows, is left out. A csv file's columns are texts, '' if empty; a parquet file's have
    pandas' nullable types, as they are declared. Raises a UserError, which names the configuration field that gives the
    path, if the file is missing, has another format, rows of different lengths, or columns without a name.
    """
    import pandas  # takes half a second; only tables and texts need it

    file = existing_path(path, field, "file", "a csv or parquet file")
    is_parquet = file.suffix.lower() == PARQUET
    try:
        if is_parquet:
            from pyarrow import parquet

            frame = pandas.read_parquet(file, dtype_backend="numpy_nullable")
            # pandas 3.1 does not read a stored index as a column. Without a name it only numbers the rows.
            named = [name for name in frame.index.names if name is not None]
            frame = frame.reset_index(named).reset_index(drop=True)
            frame.columns = frame.columns.map(str)  # also names of several levels
            # Parquet has no categories of numbers. pandas 3.1 notes them in the file, and reads numbers all the same.
            noted = (parquet.read_schema(file).pandas_metadata or {}).get("columns", [])
            coded = [column["field_name"] for column in noted if column["pandas_type"] == "categorical"]
            frame = frame.astype({name: "category" for name in coded if name in frame})
        else:
            header, rows = _read_csv(file)
            frame = pandas.DataFrame(rows, columns=header, dtype=object).drop(columns="", errors="ignore")
        if not len(frame):
            raise ValueError("it has no rows")
    except Exception as error:  # The errors of pyarrow and pandas have no common base.
        form = "parquet" if is_parquet else "csv in UTF-8"
        why = "pip install 'fedjax_ssl[tables]'" if isinstance(error, ImportError) else first_line(error)
        raise UserError(f"{path} cannot be read as {form} ({why})") from error
    return frame


def _read_csv(file: pathlib.Path) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of a csv file. Not by pandas' own reader, which fills up rows that are too short."""
    lines = file.read_text(encoding="utf-8-sig").lstrip("\r\n")
    csv.field_size_limit(max(len(lines), csv.field_size_limit()))
    header, *rows = list(_fields(lines, _delimiter(lines))) or [[]]
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


def _fields(lines: str, delimiter: str) -> Any:
    return csv.reader(io.StringIO(lines, newline=""), delimiter=delimiter, strict=True)


def _delimiter(lines: str) -> str:
    """What separates a csv file's fields: it divides the first rows as it divides the header.

    A header may have commas in its names, and rows may have decimal commas.
    """
    for delimiter in DELIMITERS:
        try:
            numbers = {len(row) for row in itertools.islice(_fields(lines, delimiter), TRIED) if row}
        except csv.Error:
            continue
        if len(numbers) == 1 and numbers != {1}:
            return delimiter
    return max(reversed(DELIMITERS), key=lines.partition("\n")[0].count)


def load_table(config: Any) -> dict[str, Any]:
    """Loads the data set in a csv or parquet file: the fields of `Dataset` except the name, by the section `data`.

    A test row without a label is left out. Without a test file see `labels.divide`. Raises a UserError if a file or
    columns are invalid; one line has all that is wrong.
    """
    path, label = config.path, config.label_column
    columns = read_columns(path, "data.path")
    listed = csv.reader(io.StringIO(config.ignore_columns), skipinitialspace=True)
    ignored = [name.strip() for line in listed for name in line if name.strip()]
    named = [field for field in ("client_column", "domain_column", "text_column") if config[field]]
    optional = {field: config[field] for field in named}
    check_columns(columns, path, ("label_column", label), *optional.items(), *(("ignore_columns", n) for n in ignored))
    uses = [label, *optional.values()]
    if twice := next((name for name in uses if uses.count(name) > 1), None):
        raise UserError(f"{path}: column {twice!r} has two uses: see data.{', '.join(['label_column', *optional])}")
    dropped = (label, config.client_column, config.domain_column, *ignored)
    inputs = columns.drop(columns=[name for name in dropped if name])

    def find_owners(rows: np.ndarray) -> np.ndarray | None:
        where = f"{path} (data.client_column={config.client_column!r})"
        return read_owners(values_of(columns[config.client_column]), rows, where) if config.client_column else None

    try:
        labels, class_names, train, tested = _divided(config, columns)
        owners, domains = find_owners(train), _domains(config, columns, train, tested)
    except UserError as error:  # what else is wrong is told, too
        rows, read = np.arange(len(columns)), {} if config.text_column else table.read_all(inputs)
        others = errors_of(lambda: find_owners(rows), lambda: find_categories(read, rows, (), path))
        raise UserError("; ".join(dict.fromkeys([str(error), *others]))) from error
    made = _texts(config, columns, train, tested) if config.text_column else _rows(config, inputs, train, tested)
    return {
        **made,
        "y_train": labels[train],
        "y_test": tested.labels,
        "num_classes": len(class_names),
        "class_names": class_names,
        "details": {**made["details"], "label_column": label},
        "owners": owners,
        "domains": domains,
    }


class Tested(NamedTuple):
    """The rows for testing, int [T], in a DataFrame, its file, and their labels, int32 [T]."""

    columns: Any
    where: str
    rows: np.ndarray
    labels: np.ndarray


def _divided(config: Any, columns: Any) -> tuple[np.ndarray, tuple[str, ...], np.ndarray, Tested]:
    """The labels of all rows, the classes' names, the training rows, and the rows for testing."""
    path, label = config.path, config.label_column
    of_labels = f"(data.label_column={label!r})"
    labels, names = read_labels(values_of(columns[label]), f"{path} {of_labels}")
    if not config.test_path:
        train, test = divide(labels, names, path)
        return labels, names, train, Tested(columns, path, test, labels[test])
    where = config.test_path
    tested = read_columns(where, "data.test_path")
    check_columns(tested, where, ("label_column", label))
    test_labels = read_labels(values_of(tested[label]), f"{where} {of_labels}", names).codes
    test = np.flatnonzero(test_labels >= 0)
    return labels, names, np.arange(len(labels)), Tested(tested, where, test, test_labels[test])


def _domains(config: Any, columns: Any, train: np.ndarray, tested: Tested) -> tuple[np.ndarray, ...]:
    """The domains of the training rows and of the rows for testing, str [n] and [T]; () without a column of domains."""
    if not (name := config.domain_column):
        return ()
    check_columns(tested.columns, tested.where, ("domain_column", name))
    parts = ((columns, train, config.path), (tested.columns, tested.rows, tested.where))
    which = f"(data.domain_column={name!r})"
    return tuple(read_names(values_of(of[name]), rows, f"{where} {which}", "domain") for of, rows, where in parts)


def values_of(column: Any) -> list[Any]:
    """A column's values, None where they are missing."""
    return column.astype(object).where(column.notna(), None).tolist()


def check_columns(columns: Collection[str], path: str, *wanted: tuple[str, str]) -> None:
    """Raises a UserError with all wanted columns, pairs of field and name, that do not exist."""
    lacking = [(field, name) for field, name in wanted if name not in columns]
    lines = [f"{path} has no column {name!r} (data.{field})" if name else f"data.{field} is empty"
             for field, name in lacking]  # fmt: skip
    if lines:
        raise UserError(f"{'; '.join(lines)}{known_are(lacking[0][1], columns)}")


def _rows(config: Any, columns: Any, train: np.ndarray, tested: Tested) -> dict[str, Any]:
    """Encodes rows of numbers and categories; categories, means and deviations come from the training rows."""
    if not len(columns.columns):
        raise UserError(f"{config.path} has no column but the label's, the clients' and those left out")
    read = table.read_all(columns)
    categories = find_categories(read, train, tested.columns.iloc[tested.rows], config.path)
    facts = {"columns": list(columns), "categories": categories}
    of_file = table.encode_columns(read, facts, config.path)
    of_test = of_file if tested.where == config.path else table.encode(tested.columns, facts, tested.where)
    return encoded(of_file[train], of_test[tested.rows], facts)


def encoded(x_train: np.ndarray, x_test: np.ndarray, facts: dict[str, Any]) -> dict[str, Any]:
    """A table's arrays, with means and deviations of the numbers in its training rows."""
    values = np.where(np.isfinite(x_train), x_train, np.nan).astype(np.float64)
    of_numbers = np.array([names is None for names in facts["categories"]]) & np.isfinite(values).any(axis=0)
    mean, std = np.zeros(values.shape[1]), np.ones(values.shape[1])
    mean[of_numbers], std[of_numbers] = np.nanmean(values[:, of_numbers], 0), np.nanstd(values[:, of_numbers], 0)
    std[std == 0] = 1.0
    statistics = {"mean": tuple(mean.tolist()), "std": tuple(std.tolist())}
    return {"kind": "table", "x_train": x_train, "x_test": x_test, **statistics, "details": facts}


def _texts(config: Any, columns: Any, train: np.ndarray, tested: Tested) -> dict[str, Any]:
    """Tokenises the column of texts."""
    name, where = config.text_column, tested.where
    check_columns(tested.columns, where, ("text_column", name))
    of_train = table.as_texts(columns[name].iloc[train])
    made = tokenised(of_train, table.as_texts(tested.columns[name].iloc[tested.rows]), config, where)
    return {**made, "details": {**made["details"], "text_column": name}}


def tokenised(train: Sequence[str], test: Sequence[str], config: Any, where: str) -> dict[str, Any]:
    """The fields of a data set of texts, tokenised as `config.tokenizer`, `vocabulary` and `text_length` say."""
    made = make_tokenizer(train, config.tokenizer, config.vocabulary)
    x_train, x_test = (tokenise(part, made, config.text_length, where) for part in (train, test))
    facts = of_texts(x_train, num_tokens(made), config.weak_views, {"tokenizer": made})
    return {"x_train": x_train, "x_test": x_test, **facts}


def of_texts(x_train: np.ndarray, num_tokens: int, weak_views: int, details: dict[str, Any]) -> dict[str, Any]:
    """The kind, facts and statistics of texts."""
    views = checked_views(weak_views, x_train)
    facts = {"shape": list(x_train.shape[1:]), "weak_views": views, "num_tokens": num_tokens, **details}
    return {"kind": "text", "mean": (), "std": (), "details": facts}


def checked_views(weak_views: int, x_train: np.ndarray) -> int:
    """Returns `data.weak_views`; raises a UserError if the examples have fewer views."""
    number = x_train.shape[1] if x_train.ndim == 3 else 1
    if weak_views > number:
        raise UserError(f"data.weak_views={weak_views}, but each example has {number} view{'s' * (number > 1)}")
    return weak_views
