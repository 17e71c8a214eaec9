"""Aggregation against plain NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.aggregation import all_finite, client_weights, weighted_mean


def test_weighted_mean_ignores_what_has_no_weight():
    rng = np.random.default_rng(0)
    uploads = {"a": rng.normal(size=(4, 3)).astype(np.float32), "b": rng.normal(size=(4,)).astype(np.float32)}
    uploads["a"][2] = np.nan
    weights = np.array([3.0, 5.0, 0.0, 2.0], np.float32)
    found = weighted_mean(uploads, weights, {"a": jnp.zeros(3), "b": jnp.float32(0)})
    rows = [0, 1, 3]
    for name in uploads:
        expected = sum(weights[m] * uploads[name][m] for m in rows) / 10.0
        np.testing.assert_allclose(found[name], expected, rtol=1e-6)


def test_no_upload_leaves_the_model_as_it_was():
    otherwise = {"a": jnp.arange(3.0)}
    found = weighted_mean({"a": jnp.full((2, 3), jnp.nan)}, jnp.zeros(2), otherwise)
    np.testing.assert_array_equal(found["a"], otherwise["a"])


@pytest.mark.parametrize("kind, expected", [("size", [7, 0, 9]), ("qualified", [2, 0, 4]), ("uniform", [1, 0, 1])])
def test_client_weights(kind, expected):
    accepted = jnp.array([True, False, True])
    found = client_weights(kind, jnp.array([7, 8, 9]), jnp.array([2, 3, 4]), accepted)
    np.testing.assert_array_equal(found, expected)


def test_all_finite_by_row():
    tree = {"a": jnp.array([[1.0, 2.0], [jnp.inf, 0.0], [1.0, 1.0]]), "b": jnp.array([0.0, 0.0, jnp.nan])}
    np.testing.assert_array_equal(all_finite(tree, batch_ndim=1), [True, False, False])
    assert not all_finite(tree)
