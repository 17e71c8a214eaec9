"""FedIL's mean without screening or anybody, and its increments; tests/official/fedil.py has whole rounds."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import State
from fedjax_ssl.engine.interface import Received, Upload
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.fedil import INCREMENTS
from fedjax_ssl.server import SERVER_MODEL
from tests.helpers.small_problem import sent_down, small_problem

KEY = jax.random.key(0)


def fake_federation(screening):
    """(method, state, received): five updates of noise, one of which was not accepted."""
    problem = small_problem("fedil", **{"fedil.cosine_screening": screening, "confidence.threshold": 0.6})
    problem.network.normalisation = "group"  # statistics do not travel
    rng, model = np.random.default_rng(3), sent_down(problem).model
    noise = lambda leaf, *axes: rng.normal(size=(*axes, *leaf.shape)).astype(np.float32)  # noqa: E731
    server = model._replace(params=jax.tree.map(lambda leaf: leaf + noise(leaf), model.params))
    state = State(jnp.int32(0), model, {SERVER_MODEL: server, INCREMENTS: jnp.full(4, jnp.nan)})
    uploads = jax.tree.map(lambda leaf: leaf + noise(leaf, 5), model.params)
    accepted, ones = jnp.array([True, True, False, True, True]), jnp.ones(5, jnp.int32)
    received = Received(Upload(model._replace(params=uploads, batch_stats=())), accepted, ones, None, ones, ones)
    return METHODS["fedil"].factory(problem), state, received


def flat(tree, rows=None):
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(*([rows] if rows else []), -1) for leaf in leaves], axis=-1)


def test_without_screening_every_accepted_update_counts():
    method, state, received = fake_federation(False)
    after, metrics = method.aggregate(state, None, received, KEY)
    mean = flat(received.uploads.model.params, 5)[np.asarray(received.accepted)].mean(axis=0)
    np.testing.assert_allclose(flat(after.model.params), mean, atol=1e-5)
    assert "screened_out" not in metrics


def test_nobody_in_the_server_s_direction_leaves_the_model():
    method, state, received = fake_federation(True)
    against = jax.tree.map(
        lambda leaf, own: jnp.stack([leaf - (own - leaf)] * 5), state.model.params, state.server[SERVER_MODEL].params
    )
    uploads = Upload(received.uploads.model._replace(params=against))
    after, metrics = method.aggregate(state, None, received._replace(uploads=uploads), KEY)
    np.testing.assert_array_equal(flat(after.model.params), flat(state.model.params))
    assert metrics["update_norm"] == 0 and metrics["screened_out"] == 4


def test_the_increment_s_average_is_over_the_last_rounds():
    method, state, received = fake_federation(False)
    norms = []
    for number in range(5):
        state, metrics = method.aggregate(state, None, received._replace(accepted=jnp.arange(5) == number), KEY)
        norms.append(float(metrics["update_norm"]))
        np.testing.assert_allclose(metrics["update_norm_average"], np.mean(norms[-4:]), rtol=1e-5)  # room for four
    np.testing.assert_allclose(state.server[INCREMENTS], norms[:0:-1], rtol=1e-6)
    assert len({round(norm, 3) for norm in norms}) == 5
