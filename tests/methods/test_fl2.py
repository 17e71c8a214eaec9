"""(FL)^2 where tests/official does not go: no gradients, nobody sure, weights by size."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.engine.interface import Received, State, Upload
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.fl2 import perturbation
from fedjax_ssl.run.validation import validate
from tests.helpers.small_problem import federation, phases_of, sent_down, small_problem, train

CLIENT, SIZE = 1, 10


@pytest.fixture(scope="module")
def data():
    return federation([[-1] * 2, [-1] * SIZE, [-1] * 4], at_server=[0, 1, 2])


def build(**fields):
    problem = small_problem("fl2", **{"confidence.threshold": 0.75, **fields})
    validate(problem.config)
    return problem, METHODS["fl2"].factory(problem)


def test_nothing_is_perturbed_by_gradients_of_zero():
    params = {"conv": {"kernel": np.float32([[0.5, -2.0]]), "bias": np.float32([0.1, 0.0])}}
    nothing, of = jax.tree.map(np.zeros_like, params), jax.jit(perturbation)
    for gradients, radius in ((nothing, 0.3), (nothing, 1e30), (params, 0.0)):
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(of(params, gradients, radius)))


# --- A client. -------------------------------------------------------------------------------------------------------


def test_if_nobody_is_sure_it_trains_as_without_sacr(data):
    """L_cs is 0 and has no gradient. tests/official has both losses."""
    found = []
    for fields in ({"confidence.threshold": 1.0}, {"fl2.consistency_weight": 0.0}):
        problem, method = build(**fields)
        _, finished = train(phases_of(method)[0], sent_down(problem), data, CLIENT, jit=True)
        found.append(finished)
    assert float(found[0].metrics["consistency_loss"]) == pytest.approx(0, abs=1e-6)
    assert found[0].metrics["adaptive_loss"] > 0 and "consistency_loss" not in found[1].metrics
    chex.assert_trees_all_close(found[0].upload.model, found[1].upload.model, atol=1e-6)


# --- Aggregation. ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "expected", "by_status"), [
    ([1.0, 1.0, 1.0, 0.2], np.array([1, 1, 1, 0]) / 3, True),  # the last one's upload was dropped
    ([0.5, 0.9, 0.8, 0.2], np.array([2, 10, 4, 0]) / 16, False),
])  # fmt: skip
def test_certain_clients_weigh_the_same(data, status, expected, by_status):
    """Without LSAA by size."""
    problem, method = build(**{"aggregation.weights": "size", "fl2.status_weights": by_status})
    state = State(jnp.int32(0), sent_down(problem).model)
    rng, accepted = np.random.default_rng(0), np.array([True, True, True, False])
    uploads = jax.tree.map(lambda leaf: rng.normal(size=(4, *leaf.shape)).astype(np.float32), state.model)
    told, sizes = {"status": jnp.float32(status)}, jnp.int32([2, 10, 4, 0])
    received = Received(Upload(uploads, told), jnp.array(accepted), jnp.arange(4), None, sizes, sizes)
    after, _ = method.aggregate(state, data, received, jax.random.key(0))
    for found, leaf in zip(jax.tree.leaves(after.model), jax.tree.leaves(uploads)):
        np.testing.assert_allclose(found, np.tensordot(expected, np.asarray(leaf), 1), atol=1e-6)
