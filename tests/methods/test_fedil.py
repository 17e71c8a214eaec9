"""FedIL's counts, its mean without screening or anybody, its increments; tests/official/fedil.py has whole rounds."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import State
from fedjax_ssl.engine.interface import Received, Upload
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.fedil import INCREMENTS
from fedjax_ssl.methods.fedil.client import Credibility, advance
from fedjax_ssl.server import SERVER_MODEL
from tests.helpers.small_problem import sent_down, small_problem

KEY = jax.random.key(0)


def test_a_label_found_k_times_in_a_row_joins_the_set():
    """Eq. 17 to 21, with k = 3, against a loop over what one example is told, visit by visit."""
    rng = np.random.default_rng(0)
    num_examples, k = 40, 3
    credibility = Credibility(*(jnp.zeros(num_examples, kind) for kind in (jnp.int32, jnp.int32, bool)))
    step = jax.jit(advance, static_argnums=5)
    row, label_of, member = [0] * num_examples, [None] * num_examples, [False] * num_examples
    for _ in range(60):
        positions = rng.choice(num_examples, 10, replace=False)
        labels = rng.integers(0, 2, 10)
        credible, counts = rng.random(10) < 0.8, rng.random(10) < 0.9
        before = credibility
        credibility = step(credibility, positions, jnp.asarray(labels, jnp.int32), credible, counts, k)
        for place, label, is_credible, is_counted in zip(positions, labels, credible, counts):
            if not is_counted or member[place]:
                continue
            if not is_credible:
                row[place] = 0
            elif row[place] and label_of[place] == label:
                row[place] += 1
            else:
                row[place] = 1
            label_of[place] = label
            member[place] = row[place] >= k
        assert np.all(credibility.in_set | ~before.in_set)  # nobody leaves
    np.testing.assert_array_equal(credibility.in_set, member)
    np.testing.assert_array_equal(credibility.count, row)
    assert 0 < sum(member) < num_examples
    for place in np.flatnonzero(member):
        assert credibility.label[place] == label_of[place]


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
