"""Arithmetic of pytrees against NumPy on one long vector."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.ops import trees

# Jitted: each operation of its own would be a program of its own.
norm, row_norms, cosines = map(jax.jit, (trees.norm, trees.row_norms, trees.cosines))


@pytest.fixture(scope="module")
def updates():
    """Five rows of two small leaves, which are joined, and a large one; the last row is 0."""
    rng = np.random.default_rng(3)
    shapes = {"a": (5, 4), "b": (5, 2, 3), "c": (5, trees.SMALL)}
    leaves = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for leaf in leaves.values():
        leaf[4] = 0
    return leaves


def as_vectors(tree):
    return np.concatenate([tree[name].reshape(len(tree[name]), -1) for name in "abc"], axis=1)


@pytest.mark.parametrize("scale", [1, 1e30, 1e-25])
def test_norms_and_cosines_of_which_no_square_overflows_or_vanishes(updates, scale):
    """An opposite update of -1e20 had the cosine -0.0, and passed as one that does not point away."""
    long = {name: np.float32(scale) * leaf for name, leaf in updates.items()}
    direction = trees.row(updates, 1)
    vectors, one = as_vectors(long).astype(float), as_vectors(updates)[1].astype(float)
    lengths = np.linalg.norm(vectors, axis=1)
    np.testing.assert_allclose(row_norms(long), lengths, rtol=1e-5)
    np.testing.assert_allclose(norm(trees.row(long, 1)), lengths[1], rtol=1e-5)
    expected = vectors[:4] @ one / lengths[:4] / np.linalg.norm(one)
    np.testing.assert_allclose(cosines(long, direction), [*expected, 0], rtol=1e-4)
    opposite = {name: -leaf for name, leaf in long.items()}
    np.testing.assert_allclose(cosines(opposite, direction)[1], -1, rtol=1e-5)


def test_lengths_of_nothing_and_of_what_diverged():
    assert norm({}) == 0 and norm({"a": jnp.zeros(3)}) == 0
    assert np.isnan(norm({"a": jnp.array([1.0, np.nan])}))


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0])
def test_clipping_shortens_a_long_update_only(updates, scale):
    old = trees.row(updates, 0)
    new = {name: old[name] + scale * updates[name][2] for name in old}
    update = scale * as_vectors(updates)[2]
    length = np.linalg.norm(update)
    assert (length > 50.0) == (scale == 3.0)
    found = trees.clip_update(new, old, 50.0)
    moved = np.concatenate([(np.asarray(found[name]) - old[name]).ravel() for name in "abc"])
    np.testing.assert_allclose(moved, update * min(1, 50.0 / max(length, 50.0)), rtol=1e-4, atol=1e-6)


def test_all_finite_by_row():
    """Small leaves are joined, large ones are not."""
    tree = {"a": np.ones((3, trees.SMALL), np.float32), "b": np.zeros((3, 2), np.float32), "c": np.zeros(3, np.float32)}
    tree["a"][1, 5], tree["c"][2] = np.inf, np.nan
    finite = jax.jit(trees.all_finite, static_argnames="batch_ndim")
    np.testing.assert_array_equal(finite(tree, batch_ndim=1), [True, False, False])
    assert not finite(tree) and finite({"a": tree["a"][0]})


def test_bytes():
    assert trees.tree_bytes({"a": jnp.zeros((3, 2)), "b": jnp.zeros(5, jnp.int8), "c": jnp.zeros((), bool)}) == 30
    assert trees.tree_bytes(()) == 0


def test_a_weighted_sum_of_rows_is_a_matrix_product(updates):
    """Of a sum over the rows XLA's CPU backend makes a program whose time is quadratic in the leaf's size."""
    weights = np.asarray([0.5, 0, 2, 1, 3], np.float32)
    for leaf in updates.values():
        summed = trees.weighted_sum(jnp.asarray(weights), leaf)
        np.testing.assert_allclose(summed, np.einsum("m,m...->...", weights.astype(float), leaf), rtol=1e-6, atol=1e-7)
    program = str(jax.make_jaxpr(trees.weighted_sum)(weights, updates["b"]))
    assert "dot_general" in program and "reduce_sum" not in program
