"""Tables: rows of numbers and categories, with missing values.

A row is float32 [F]; categories are stored as codes, missing values as NaN. Weak views add a little noise to numbers.
Strong views also replace a share of the values by those of other rows, and make a share missing. The other rows are
from the same batch, because a client holds only its own rows; a short batch is padded with rows of the same client.

Source: Bahri et al., "SCARF: Self-Supervised Contrastive Learning using Random Feature Corruption", ICLR 2022, which
draws from the column's values in the whole training set.
"""

import functools
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.base.errors import UserError, first_line
from fedjax_ssl.data.kinds.features import MASKED, noisy
from fedjax_ssl.data.kinds.kind import Facts, Kind
from fedjax_ssl.data.values import MISSING, NUMBER, text_of
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
    table: Any = KIND.inputs(facts)
    strong = functools.partial(strong_view, table=table)
    return Views(functools.partial(weak_view, table=table), strong, (strong, strong))


def as_texts(column: Any) -> Any:
    """A column's values as texts, '' if missing; None for lists, dates and times: a Series of objects."""
    return column.astype(object).where(column.notna(), None).map(text_of).astype(object)


def are_missing(texts: Any) -> np.ndarray:
    """Which texts of a Series are missing values: bool [N]."""
    return texts.str.strip().str.lower().isin(MISSING).to_numpy(bool)


def are_numbers(texts: Any) -> np.ndarray:
    """Which texts of a Series are numbers: bool [N]."""
    return texts.str.fullmatch(NUMBER).fillna(False).to_numpy(bool)


def as_numbers(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """A column's values as numbers, float64 [N], NaN if missing; and which are neither missing nor fit into float32."""
    import pandas  # takes half a second; only tables need it

    if pandas.api.types.is_numeric_dtype(column.dtype):
        values = column.to_numpy(np.float64, na_value=np.nan)
        return values, ~np.isnan(values) & ~(np.abs(values) <= MOST_NUMBER)
    texts = as_texts(column)
    is_number = are_numbers(texts)
    values = np.asarray(pandas.to_numeric(texts.where(is_number), errors="coerce"), np.float64)
    return values, ~are_missing(texts.fillna("a list")) & ~(np.abs(values) <= MOST_NUMBER)


def encode(columns: Any, facts: Facts, where: str = "the table") -> np.ndarray:
    """Encodes columns of values as stored rows, float32 [N, F]; categories not seen in training are missing.

    Prints a line with the number of such categories in each column.

    Args:
        columns: name -> values [N], a dict or a DataFrame.
        facts: facts of the data set.
        where: the file, for messages.

    Raises:
        UserError: a column is missing, columns differ in length, or a column of numbers has a text or a number that
            float32 cannot hold.
    """
    import pandas

    try:
        frame = pandas.DataFrame(columns).rename(columns=str)
    except ValueError as error:
        raise UserError(f"{where} is not a list of values for each column ({first_line(error)})") from error
    absent = [name for name in facts["columns"] if name not in frame]
    if absent:
        raise UserError(f"{where} has no column {', '.join(map(repr, absent))}; it has {', '.join(frame) or 'none'}")
    encoded = np.empty((len(frame), len(facts["columns"])), np.float32)
    unknown = []
    for place, (name, categories) in enumerate(zip(facts["columns"], facts["categories"])):
        if categories is None:
            values, wrong = as_numbers(frame[name])
            if wrong.any():
                row = int(np.argmax(wrong))
                raise UserError(
                    f"{where}: column {name!r} is of numbers of float32, but has {_shown(frame[name].iloc[row])} in "
                    f"row {row + 1}"
                )
            encoded[:, place] = values
        else:
            texts = as_texts(frame[name]).fillna("a list")
            codes = {_boolean(category): code for code, category in enumerate(categories)}
            encoded[:, place] = [codes.get(_boolean(text), np.nan) for text in texts]
            others = texts[np.isnan(encoded[:, place]) & ~are_missing(texts)]
            if len(others):
                unknown.append(f"{name!r} in {len(others):,}, such as {others.iloc[0]!r:.40}")
    if unknown:
        line = f"of {len(frame):,} rows these have categories that training had not, which count as missing: column "
        print(f"warning: {where}: {line}{'; column '.join(unknown)}", file=sys.stderr, flush=True)
    return encoded


def _boolean(text: str) -> str:
    """true or TRUE in a csv file is True in a parquet file and in a DataFrame."""
    return text.capitalize() if text.lower() in ("true", "false") else text


def _shown(value: Any) -> str:
    """A value in a message."""
    text = text_of(value)
    return f"{' '.join(str(value).split()) if text is None else text!r:.40}"


def _given(rows: Any, facts: Facts) -> np.ndarray:
    """Encodes columns by name, from a dict or a DataFrame, or checks stored rows [B, F]."""
    rows = encode(rows, facts) if isinstance(rows, Mapping) or hasattr(rows, "columns") else np.asarray(rows)
    number = len(facts["columns"])
    if rows.ndim != 2 or rows.shape[1] != number or not len(rows) or rows.dtype.kind not in "fiu":
        raise UserError(
            f"a table of {rows.dtype} {rows.shape}; the model takes columns by name, or numbers [B, {number}] with "
            "codes for categories"
        )
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
