"""Orchestra: balanced assignments, and clusters at clients and server, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.client.deck import Examples
from fedjax_ssl.engine.interface import Received, Upload
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.orchestra import clusters
from fedjax_ssl.methods.orchestra.clusters import Ring, filled, global_centroids, pushed, sinkhorn
from tests.helpers.linear_heads import DIM, LinearHeads, unit
from tests.helpers.small_problem import federation, small_problem

ENCODER = ("backbone", "projector")


# --- Balanced assignments. -------------------------------------------------------------------------------------------


def vectors_of(number, dim=3, seed=0):
    return unit(np.random.default_rng(seed).normal(size=(number, dim)) + [1.0, 0.0, 0.0][:dim]).astype(np.float32)


def test_rows_that_do_not_count_change_no_assignment():
    """tests/official/orchestra.py has the assignments."""
    balanced, scores = jax.jit(sinkhorn, static_argnums=2), vectors_of(12) @ vectors_of(4, seed=1).T
    ours = balanced(scores, np.ones(12, bool), 100)
    padded = balanced(np.concatenate([scores, np.full((3, 4), 9.0, np.float32)]), np.arange(15) < 12, 100)
    np.testing.assert_allclose(padded[:12], ours, atol=1e-4)
    assert np.all(np.asarray(padded[12:]) == 0)


# --- A client's memory and clusters. ---------------------------------------------------------------------------------


def test_a_memory_has_the_last_rows():
    """First in, first out: against a plain list, with batches that are short, empty and longer than the memory."""
    push, rng = jax.jit(pushed), np.random.default_rng(0)
    ring = Ring(np.zeros((5, 2), np.float32), np.int32(0))
    expected = list(ring.rows)
    for number in (2, 0, 3, 7, 1, 4, 7):
        rows, present = rng.normal(size=(7, 2)).astype(np.float32), np.zeros(7, bool)
        present[rng.permutation(7)[:number]] = True
        ring = push(ring, rows, present)
        expected = [*expected, *rows[present]][-5:]
        in_order = np.roll(np.asarray(ring.rows), -int(ring.oldest), axis=0)
        np.testing.assert_array_equal(in_order, expected)


def test_the_first_round_fills_the_memory_with_the_first_images():
    """In batches of their own, each client as many as its memory has rows, of whatever number it has."""
    rows = np.arange(20).reshape(2, 10)
    present = np.arange(10) < np.array([[10], [3]])
    rings = Ring(np.full((2, 4, 1), -1.0, np.float32), np.zeros(2, np.int32))
    images = np.arange(20, dtype=np.uint8).reshape(20, 1, 1, 1)

    def project(key, batch, mask):
        del key
        return batch.reshape(-1, 1) + jnp.sum(mask) / 10  # so that its batch is seen

    keys = jax.random.split(jax.random.key(0), 2)
    fill = jax.jit(
        lambda images, rows, present, rings: filled(project, images, Examples(rows, present, rows, keys, {}), rings, 3)
    )
    rings = fill(images, rows, present, rings)
    # The second batch of the first client goes on where the memory begins again.
    np.testing.assert_allclose(rings.rows[0, :, 0], [4.3, 5.3, 2.3, 3.3], atol=1e-6)
    np.testing.assert_allclose(rings.rows[1, :, 0], [10.3, 11.3, 12.3, -1.0], atol=1e-6)
    np.testing.assert_array_equal(rings.oldest, [2, 3])


# --- The server. -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data():
    return federation([[0, 2], [-1] * 7], at_server=[0, 1, 2, 1])


def problem_of(**fields):
    """Four clusters of two-dimensional projections, and memories of six."""
    network = LinearHeads(
        {"projector": ("", DIM), "rotation": ("projector", 4)},
        companions={"target": LinearHeads({"projector": ("", DIM)}, classes=0)},
    )
    sizes = {"orchestra.clusters": 4, "orchestra.local_clusters": 2, "orchestra.memory": 6, "model.projector_dim": DIM}
    return small_problem(
        "orchestra", network, **{"client.clip_norm": 0.0, "client.learning_rate": 0.05, **sizes, **fields}
    )


def test_the_server_averages_and_clusters_what_was_accepted(data, monkeypatch):
    monkeypatch.setattr(clusters, "STEPS", 5)
    problem = problem_of()
    method = METHODS["orchestra"].factory(problem)
    state = jax.jit(method.init)(data, jax.random.key(0))
    params = state.model.params
    names = (*ENCODER, "rotation", "target")
    sent = jax.tree.map(lambda leaf: np.stack([np.asarray(leaf) + k for k in (1.0, 2.0, np.nan)]),
                        state.model._replace(params={name: params[name] for name in names}))  # fmt: skip
    told = np.stack([vectors_of(2, DIM, seed=seed) for seed in range(3)])
    received = Received(
        Upload(sent, {"centroids": told}), np.array([True, True, False]), np.arange(3), None, np.array([2, 9, 5]), None
    )
    after, metrics = jax.jit(method.aggregate)(state, data, received, jax.random.key(1))
    for name in names:  # 1 batch (at least) and 3
        jax.tree.map(
            lambda new, old: np.testing.assert_allclose(new, old + 1.75, rtol=1e-5),
            after.model.params[name],
            params[name],
        )
    expected, loss = global_centroids(state.server["centroids"], told.reshape(-1, DIM), np.arange(6) < 4)
    np.testing.assert_allclose(after.server["centroids"], expected, atol=1e-5)
    assert metrics["clustering_loss"] == pytest.approx(float(loss), rel=1e-4)
    problem.network.given = state.model  # whose target stays
    params = jax.jit(METHODS["orchestra"].factory(problem).init)(data, jax.random.key(0)).model.params
    drawn = problem.network.init(jax.random.split(jax.random.key(0), 3)[0]).params
    jax.tree.map(np.testing.assert_array_equal, params["target"], drawn["target"])
    assert np.any(params["target"]["backbone"]["kernel"] != params["backbone"]["kernel"])


def test_what_cannot_be():
    for fields, words in (
        ({"orchestra.local_clusters": 7}, "orchestra.local_clusters=7 is more than orchestra.memory=6"),
        ({}, "turns images by quarters, but the data set's are 3 x 2"),
    ):
        problem = problem_of(**fields)
        if not fields:
            problem.network.inputs = problem.network.inputs._replace(shape=(2, 3, 1))
        with pytest.raises(UserError, match=words):
            METHODS["orchestra"].factory(problem)
