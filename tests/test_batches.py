"""Rows in chunks: `learning/batches.py`."""

from unittest import mock

import jax
import numpy as np
import pytest

from fedjax_ssl.learning.batches import map_batches


@pytest.mark.parametrize(
    ("backend", "batch_size", "count", "chunk"),
    [
        ("cpu", None, 200, 50),  # four even chunks of at most 64
        ("cpu", None, 64, 64),
        ("cpu", None, 65, 33),
        ("gpu", None, 200, 200),
        ("gpu", None, 1001, 334),  # at most 500
        ("cpu", 100, 200, 100),  # what is asked for
        ("cpu", 500, 7, 7),
    ],
)
def test_rows_come_in_even_chunks_of_what_is_fast_on_the_backend(backend, batch_size, count, chunk):
    seen = []

    def double(rows):
        seen.append(rows.shape)
        return 2 * rows

    rows = np.arange(3 * count).reshape(count, 3)
    with mock.patch.object(jax, "default_backend", lambda: backend):
        doubled = map_batches(double, rows, batch_size)
    assert set(seen) == {(chunk, 3)}
    np.testing.assert_array_equal(doubled, 2 * rows)
