"""Tables: rows of numbers and categories, with missing values.

A row is float32 [F]; categories are stored as codes, missing values as NaN. Weak views add a little noise to numbers.
Strong views also replace a share of the values by those of other rows, and make a share missing. The other rows are
from the same batch, because a client holds only its own rows; a short batch is padded with rows of the same client.

Source: Bahri et al., "SCARF: Self-Supervised Contrastive Learning using Random Feature Corruption", ICLR 2022, which
draws from the column's values in the whole training set.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.base.errors import UserError, first_line, say
from fedjax_ssl.data.kinds.features import MASKED, noisy
from fedjax_ssl.data.kinds.kind import Facts, Kind
from fedjax_ssl.data.values import is_missing, is_number, same, text_of
from fedjax_ssl.ops.augment import Views, mix

CORRUPTED = 0.3  # strong views: the share of values taken from other rows of the batch
MOST_NUMBER = np.finfo(np.float32).max


class Table(NamedTuple):
    """Rows, stored as float32."""

    shape: tuple[int]  # (F,)
    # mean and std: of each column of numbers over the training set; 0 and 1 for categories.
    mean: np.ndarray
    std: np.ndarray
    sizes: tuple[int, ...]  # number of categories of each column; 0 for a column of numbers

    def to_network(self, inputs: jax.Array) -> jax.Array:
        """Encodes rows: standardised numbers (0 if missing), one-hot categories, missing flags: float32 [B, F']."""
        missing = jnp.isnan(inputs)
        numbers = np.flatnonzero(np.array(self.sizes) == 0)
        standard = jnp.where(missing, 0.0, (inputs - self.mean) / self.std)
        one_hot = [
            jax.nn.one_hot(jnp.where(missing[:, column], -1, inputs[:, column]).astype(jnp.int32), size)
            for column, size in enumerate(self.sizes)
            if size
        ]
        return jnp.concatenate([standard[:, numbers], *one_hot, missing.astype(jnp.float32)], axis=1)

    def mix(self, a: jax.Array, b: jax.Array, lam: jax.Array) -> jax.Array:
        """Mixes numbers, which are missing if either row lacks them; takes categories from the row of larger weight."""
        return jnp.where(np.array(self.sizes) > 0, jnp.where(lam >= 0.5, a, b), mix(a, b, lam))


def weak_view(key: jax.Array, rows: jax.Array, table: Table) -> jax.Array:
    """Adds noise to the numbers of rows."""
    return jnp.where(np.array(table.sizes) > 0, rows, noisy(key, rows, table.std))


def strong_view(key: jax.Array, rows: jax.Array, table: Table) -> jax.Array:
    """Replaces some values, drawn one by one, by those of other rows of the batch, and makes some missing."""
    weak_key, row_key, corrupt_key, mask_key = jax.random.split(key, 4)
    others = jnp.take_along_axis(rows, jax.random.randint(row_key, rows.shape, 0, len(rows)), axis=0)
    rows = weak_view(weak_key, rows, table)
    rows = jnp.where(jax.random.bernoulli(corrupt_key, CORRUPTED, rows.shape), others, rows)
    return jnp.where(jax.random.bernoulli(mask_key, MASKED, rows.shape), jnp.nan, rows)


def _views(config: Any, facts: Facts) -> Views:
    table = _inputs(facts)
    strong = functools.partial(strong_view, table=table)
    return Views(functools.partial(weak_view, table=table), strong, (strong, strong))


class Column(NamedTuple):
    """A column of N values of any type, converted once for all that reads it."""

    values: Any  # a Series: as they were given
    texts: Any  # a Series, see `as_texts`; None for a column whose declared type is a number or a boolean
    numbers: np.ndarray  # float64 [N], NaN for what is no number
    is_missing: np.ndarray  # bool [N]

    def of(self, rows: np.ndarray) -> "Column":
        """The column of some rows."""
        texts = None if self.texts is None else self.texts.iloc[rows]
        return Column(self.values.iloc[rows], texts, self.numbers[rows], self.is_missing[rows])


def read_column(values: Any) -> Column:
    """Converts a Series."""
    import pandas  # takes half a second; only tables need it

    if pandas.api.types.is_numeric_dtype(values.dtype):
        numbers = values.to_numpy(np.float64, na_value=np.nan)
        return Column(values, None, numbers, np.isnan(numbers))
    texts = as_texts(values)
    are_numbers = np.array([text is not None and is_number(text) for text in texts], bool)
    numbers = np.full(len(texts), np.nan)
    numbers[are_numbers] = texts[are_numbers].to_numpy().astype(np.float64)
    missing = ~are_numbers
    missing[missing] = [text is not None and is_missing(text) for text in texts[missing]]
    return Column(values, texts, numbers, missing)


def read_all(columns: Any) -> dict[str, Column]:
    """Converts the columns of a DataFrame."""
    return {name: read_column(columns[name]) for name in columns}


def as_texts(values: Any) -> Any:
    """A Series as texts, '' if missing; None for lists, dates and times: a Series of objects."""
    import pandas

    texts, present = np.full(len(values), "", object), values.notna().to_numpy(bool)
    texts[present] = [text_of(value) for value in values[present]]
    return pandas.Series(texts, values.index, object)


def no_number(column: Column) -> np.ndarray:
    """Which values are neither missing nor a number of float32: bool [N]."""
    return ~column.is_missing & ~(np.abs(column.numbers) <= MOST_NUMBER)


def encode(columns: Any, facts: Facts, where: str = "the table") -> np.ndarray:
    """Encodes columns of values, name -> values [N], a dict or a DataFrame, as stored rows; see `encode_columns`.

    `facts` are of the data set; `where` is the file, for messages. Raises a UserError if a column is missing, columns
    differ in length, or a column of numbers has a text or a number that float32 cannot hold.
    """
    import pandas

    if isinstance(columns, Mapping):  # pandas would match the rows of several Series by their labels
        columns = {name: getattr(values, "array", values) for name, values in columns.items()}
    try:
        frame = pandas.DataFrame(columns).rename(columns=str)
    except ValueError as error:
        raise UserError(f"{where} is not a list of values for each column ({first_line(error)})") from error
    absent = [name for name in facts["columns"] if name not in frame]
    if absent:
        raise UserError(f"{where} has no column {', '.join(map(repr, absent))}; it has {', '.join(frame) or 'none'}")
    return encode_columns(read_all(frame[facts["columns"]]), facts, where)


def encode_columns(columns: Mapping[str, Column], facts: Facts, where: str) -> np.ndarray:
    """Encodes the columns in `facts` as stored rows, float32 [N, F]; categories not seen in training are missing.

    Prints a line with the number of such categories in each column. Raises a UserError, see `encode`.
    """
    made, unknown = [], []
    for (name, column), categories in zip(columns.items(), facts["categories"]):
        if categories is None:
            if (wrong := no_number(column)).any():
                row = int(np.argmax(wrong))
                value = column.values.iloc[row]
                text = text_of(value)
                has = f"{' '.join(str(value).split()) if text is None else text!r:.40} in row {row + 1}"
                raise UserError(f"{where}: column {name!r} is of numbers of float32, but has {has}")
            made.append(column.numbers.astype(np.float32))
        else:
            texts = (as_texts(column.values) if column.texts is None else column.texts).fillna("a list")
            codes = {same(category): code for code, category in enumerate(categories)}
            made.append(np.array([codes.get(same(text), np.nan) for text in texts], np.float32))
            others = texts[np.isnan(made[-1]) & ~column.is_missing]
            if len(others):
                unknown.append(f"{name!r} in {len(others):,}, such as {others.iloc[0]!r:.40}")
    if unknown:
        line = f"of {len(made[0]):,} rows these have categories that training had not, which count as missing: column "
        say(f"warning: {where}: {line}{'; column '.join(unknown)}")
    return np.stack(made, axis=1)


def _given(rows: Any, facts: Facts) -> np.ndarray:
    """Encodes columns by name, from a dict or a DataFrame, or checks stored rows [B, F]."""
    rows = encode(rows, facts) if isinstance(rows, Mapping) or hasattr(rows, "columns") else np.asarray(rows)
    number = len(facts["columns"])
    if rows.ndim != 2 or rows.shape[1] != number or not len(rows) or rows.dtype.kind not in "fiu":
        wanted = f"columns by name, or numbers [B, {number}] with codes for categories"
        raise UserError(f"a table of {rows.dtype} {rows.shape}; the model takes {wanted}")
    with np.errstate(over="ignore"):
        rows = rows.astype(np.float32)
    for name, categories, values in zip(facts["columns"], facts["categories"], rows.T):
        allowed = np.isfinite(values) if categories is None else np.isin(values, range(len(categories)))
        if (wrong := values[~np.isnan(values) & ~allowed]).size:
            known = "finite in float32" if categories is None else f"codes 0 to {len(categories) - 1}"
            raise UserError(f"column {name!r} has {wrong[0]:g}; its values are {known}, or nan if missing")
    return rows


def _inputs(facts: Facts) -> Table:
    sizes = tuple(0 if names is None else len(names) for names in facts["categories"])
    return Table((len(sizes),), np.asarray(facts["mean"], np.float32), np.asarray(facts["std"], np.float32), sizes)


KIND = Kind(noun="rows", stored=np.float32, inputs=_inputs, views=_views, given=_given)
