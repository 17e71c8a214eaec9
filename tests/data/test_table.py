"""The flat table of images gives what the array gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.devices import use_platform
from fedjax_ssl.data.table import FlatTable, image_table

IMAGES = np.random.default_rng(0).integers(0, 256, (7, 4, 5, 3), np.uint8)


@pytest.fixture(scope="module")
def table():
    with use_platform("tpu"):
        return image_table(IMAGES)


def test_it_is_flat_on_a_tpu_alone(table):
    assert isinstance(table, FlatTable) and [leaf.shape for leaf in jax.tree.leaves(table)] == [(7, 60)]
    assert isinstance(image_table(IMAGES), jax.Array)
    with use_platform("tpu"):
        assert image_table(IMAGES[:0]).shape == (0, 4, 5, 3)


def test_it_looks_and_indexes_like_the_array(table):
    assert (table.shape, table.ndim, len(table), table.dtype) == (IMAGES.shape, 4, 7, np.uint8)
    for rows in (3, slice(2, 5), jnp.array([[0, 6], [2, 2]]), jnp.arange(7) > 3):
        np.testing.assert_array_equal(table[rows], IMAGES[rows])
    np.testing.assert_array_equal(np.asarray(table), IMAGES)
    assert np.asarray(table, np.float32).dtype == np.float32
    np.testing.assert_array_equal(jnp.max(table, axis=0), IMAGES.max(axis=0))


def test_it_goes_through_transformations(table):
    rows = jnp.array([5, 1])
    np.testing.assert_array_equal(jax.jit(lambda t, r: t[r])(table, rows), IMAGES[np.array([5, 1])])
    np.testing.assert_array_equal(jax.vmap(lambda t, r: t[r], (None, 0))(table, rows), IMAGES[np.array([5, 1])])
    two = jax.tree.map(lambda *of: jnp.stack(of), table, table)
    assert two.shape == (2, *IMAGES.shape)
    np.testing.assert_array_equal(jax.vmap(lambda t, r: t[r])(two, rows), IMAGES[np.array([5, 1])])
