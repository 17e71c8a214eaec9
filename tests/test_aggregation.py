"""Aggregation against plain NumPy."""

import types

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from fedjax_ssl.engine.interface import ModelUpload, Received, State
from fedjax_ssl.learning.trees import all_finite, cosines
from fedjax_ssl.server.aggregation import client_weights, clip_updates, make_aggregation, weighted_mean


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


def test_clipping_shortens_long_updates_only():
    rng = np.random.default_rng(2)
    current = {"a": rng.normal(size=(3,)).astype(np.float32), "b": rng.normal(size=(2, 2)).astype(np.float32)}
    scale = np.array([0.1, 1.0, 10.0], np.float32)
    uploads = {
        name: leaf + scale.reshape(-1, *[1] * leaf.ndim) * rng.normal(size=(3, *leaf.shape)).astype(np.float32)
        for name, leaf in current.items()
    }
    clipped = clip_updates(uploads, current, 1.5)
    for row in range(3):
        update = np.concatenate([(uploads[name][row] - current[name]).ravel() for name in "ab"])
        found = np.concatenate([(np.asarray(clipped[name][row]) - current[name]).ravel() for name in "ab"])
        length = np.linalg.norm(update)
        np.testing.assert_allclose(found, update * min(1, 1.5 / length), rtol=1e-4, atol=1e-6)
        assert (length > 1.5) == (row == 2) or row == 1


def test_cosines():
    rng = np.random.default_rng(3)
    direction = {"a": rng.normal(size=(4,)).astype(np.float32), "b": rng.normal(size=(2, 3)).astype(np.float32)}
    updates = {name: rng.normal(size=(5, *leaf.shape)).astype(np.float32) for name, leaf in direction.items()}
    updates = {
        name: np.where(np.arange(5).reshape(-1, *[1] * (leaf.ndim - 1)) == 4, 0, leaf) for name, leaf in updates.items()
    }
    one = np.concatenate([direction[name].ravel() for name in "ab"])
    found = cosines(updates, direction)
    for row in range(4):
        other = np.concatenate([updates[name][row].ravel() for name in "ab"])
        np.testing.assert_allclose(found[row], one @ other / np.linalg.norm(one) / np.linalg.norm(other), rtol=1e-5)
    assert found[4] == 0


def rounds_of(optimizer, scales=(1, 0, 1), **options):
    """Rounds of aggregation of two clients' updates, a multiple of fixed ones; where it is 0, nobody's is accepted."""
    section = ConfigDict({"weights": "size", "clip_norm": 0.0, "optimizer": optimizer, "learning_rate": 1.0,
                          "momentum": 0.5, "adaptivity": 1e-3, **options})  # fmt: skip
    problem = types.SimpleNamespace(
        config=types.SimpleNamespace(aggregation=section), network=types.SimpleNamespace(normalisation="static")
    )
    aggregation = make_aggregation(problem, ("classifier",))
    params = {"classifier": jnp.array([1.0, -2.0]), "anchor_head": jnp.array([7.0])}
    state = State(jnp.int32(0), params, {}, aggregation.init(params))
    updates = np.array([[0.2, 0.4], [-0.2, 0.8]], np.float32)
    trace, norms = [np.asarray(params["classifier"])], []
    for scale in scales:
        uploads = ModelUpload({"classifier": state.params["classifier"] + scale * updates}, ())
        received = Received(uploads, jnp.array([scale != 0] * 2), jnp.array([30, 10]), jnp.array([3, 1]))
        state, metrics = aggregation.aggregate(state, received)
        trace.append(np.asarray(state.params["classifier"]))
        norms.append(float(metrics["update_norm"]))
    np.testing.assert_array_equal(state.params["anchor_head"], params["anchor_head"])
    np.testing.assert_allclose(norms, np.linalg.norm(np.diff(trace, axis=0), axis=1), rtol=1e-5)
    return trace, 0.75 * updates[0] + 0.25 * updates[1]


def test_fedavg_takes_the_mean():
    trace, mean = rounds_of("fedavg")
    np.testing.assert_allclose(trace[1] - trace[0], mean, rtol=1e-5)
    np.testing.assert_array_equal(trace[2], trace[1])


def test_server_momentum_is_semifl_s():
    """m <- 0.5 m + g with m = g at first, w <- w - m; a round without uploads leaves both as they are."""
    trace, mean = rounds_of("fedavgm")
    np.testing.assert_allclose(trace[1] - trace[0], mean, rtol=1e-5)
    np.testing.assert_array_equal(trace[2], trace[1])
    np.testing.assert_allclose(trace[3] - trace[2], 1.5 * mean, rtol=1e-5)


def test_fedadam():
    trace, mean = rounds_of("fedadam", learning_rate=0.1)
    first, second = np.zeros(2), np.zeros(2)
    expected = trace[0].astype(np.float64)
    for count in (1, 2):  # the round without uploads does not count
        first, second = 0.5 * first + 0.5 * -mean, 0.99 * second + 0.01 * mean**2
        corrected = first / (1 - 0.5**count), second / (1 - 0.99**count)
        expected = expected - 0.1 * corrected[0] / (np.sqrt(corrected[1]) + 1e-3)
    np.testing.assert_allclose(trace[3], expected, rtol=1e-4)


# Once v has learned of a long update, short ones let it shrink: Yogi's sign takes both values.
SCALES = (1.0, 0.0, 0.05, 0.5)


def test_fedadagrad():
    """Reddi et al., 2021, Algorithm 2 without momentum; v is 0.1 at first, the adaptivity below the root (optax's)."""
    trace, mean = rounds_of("fedadagrad", SCALES, learning_rate=0.1, adaptivity=0.02)
    v, expected = np.full(2, 0.1), trace[0].astype(np.float64)
    for scale, found in zip(SCALES, trace[1:]):
        if scale:
            update = scale * mean
            v = v + update**2
            expected = expected + 0.1 * update / np.sqrt(v + 0.02)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_fedyogi():
    """Reddi et al., 2021, Algorithm 2 with Adam's bias correction, and first accumulators of 1e-6 (optax's)."""
    trace, mean = rounds_of("fedyogi", SCALES, learning_rate=0.1)
    m, v, count, signs = np.full(2, -1e-6), np.full(2, 1e-6), 0, set()
    expected = trace[0].astype(np.float64)
    for scale, found in zip(SCALES, trace[1:]):
        if scale:
            update, count = scale * mean, count + 1
            sign = np.sign(v - update**2)
            m, v = 0.5 * m + 0.5 * update, v - 0.01 * update**2 * sign
            expected = expected + 0.1 * m / (1 - 0.5**count) / (np.sqrt(v / (1 - 0.99**count)) + 1e-3)
            signs |= set(sign)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert signs == {-1, 1}
