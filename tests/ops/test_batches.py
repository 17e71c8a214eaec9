"""Rows in chunks: `ops/batches.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.devices import use_platform
from fedjax_ssl.ops.batches import epoch_orders, map_batches


@pytest.mark.parametrize(("platform", "batch_size", "count", "chunk"), [
    ("cpu", None, 100, 25),  # four even chunks of at most 32
    ("cpu", None, 32, 32),
    ("cpu", None, 33, 17),
    ("gpu", None, 200, 200),
    ("gpu", None, 1001, 334),  # at most 500
    ("tpu", None, 200, 200),
    ("tpu", None, 1001, 250),  # all chunks of all passes of one size
    ("cpu", 100, 200, 100),  # what is asked for
    ("cpu", 500, 7, 7),
])  # fmt: skip
def test_rows_come_in_chunks_of_what_is_fast_on_the_platform(platform, batch_size, count, chunk):
    seen = []

    def double(rows):
        seen.append(rows.shape)
        return 2 * rows

    with use_platform(platform):
        shape = jax.eval_shape(
            lambda rows: map_batches(double, rows, batch_size), jax.ShapeDtypeStruct((count, 3), np.float32)
        ).shape
    assert set(seen) == {(chunk, 3)} and shape == (count, 3)


def test_chunks_change_no_row():
    rows = np.arange(21).reshape(7, 3)  # the last chunk is a row short
    np.testing.assert_array_equal(jax.jit(lambda rows: map_batches(lambda part: 2 * part, rows, 4))(rows), 2 * rows)


def test_more_padding_changes_no_order():
    key, included = jax.random.key(0), np.array([True, False, True, True, False, True, True])
    orders = epoch_orders(key, included, 3)
    draws = np.where(included, jax.random.uniform(key, (3, 7)), np.inf)
    np.testing.assert_array_equal(orders, np.argsort(draws, axis=1, kind="stable"))
    padded = epoch_orders(key, np.pad(included, (0, 4)), 3, jnp.int32(7))
    np.testing.assert_array_equal(padded[:, :7], orders)
