"""FedIL's rules against plain Python and NumPy: the counts, the screening, the end of a run."""

import types

import jax
import jax.numpy as jnp
import numpy as np

from conftest import make_tiny_config
from fedjax_ssl import State
from fedjax_ssl.config import apply_arguments
from fedjax_ssl.experiment import build_experiment
from fedjax_ssl.local_training import ModelUpload
from fedjax_ssl.method import Received
from fedjax_ssl.methods.fedil import Credibility, advance
from fedjax_ssl.server_model import ServerModel


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
    np.testing.assert_array_equal(credibility.in_set, member)
    np.testing.assert_array_equal(credibility.count, row)
    assert 0 < sum(member) < num_examples
    for place in np.flatnonzero(member):
        assert credibility.label[place] == label_of[place]


def fake_federation(screening):
    config = apply_arguments(make_tiny_config(**{"fedil.cosine_screening": screening}), "fedil")
    config.fedil.stop_below, config.fedil.stop_rounds, config.fedil.average_rounds = 0.5, 2, 3
    experiment = build_experiment(config)
    state = State(jnp.int32(0), *experiment.problem.network.init(jax.random.key(0)))
    rng = np.random.default_rng(1)
    noise = lambda leaf, *axes: rng.normal(size=(*axes, *leaf.shape)).astype(np.float32)  # noqa: E731
    server = jax.tree.map(lambda leaf: leaf + noise(leaf), state.params)
    state = state._replace(server={"model": ServerModel(server, state.batch_stats), "increments": jnp.full(3, jnp.nan)})
    uploads = jax.tree.map(lambda leaf: leaf + noise(leaf, 5), state.params)
    accepted = jnp.array([True, True, False, True, True])
    ones = jnp.ones(5, jnp.int32)
    return experiment.method, state, Received(ModelUpload(uploads, ()), accepted, ones, ones)


def flat(tree, rows=None):
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(*([rows] if rows else []), -1) for leaf in leaves], axis=-1)


def test_updates_against_the_server_s_direction_are_left_out():
    """Eq. 24 to 26 over all parameters as one vector."""
    for screening in (True, False):
        method, state, received = fake_federation(screening)
        after, metrics = method.aggregate(state, received)
        theta, server = flat(state.params), flat(state.server["model"].params)
        updates = flat(received.uploads.params, 5) - theta
        cosine = updates @ (server - theta) / np.linalg.norm(updates, axis=1) / np.linalg.norm(server - theta)
        kept = np.asarray(received.accepted) & ((cosine >= 0) | (not screening))
        assert kept.sum() > 0 and (not screening or kept.sum() < 4)
        np.testing.assert_allclose(flat(after.params), theta + updates[kept].mean(axis=0), atol=1e-5)
        np.testing.assert_allclose(metrics["update_norm"], np.linalg.norm(updates[kept].mean(axis=0)), rtol=1e-5)
        if screening:
            assert metrics["screened_out"] == 4 - kept.sum()


def test_nobody_in_the_server_s_direction_leaves_the_model():
    method, state, received = fake_federation(True)
    against = jax.tree.map(
        lambda leaf, own: jnp.stack([leaf - (own - leaf)] * 5), state.params, state.server["model"].params
    )
    after, metrics = method.aggregate(state, received._replace(uploads=ModelUpload(against, ())))
    np.testing.assert_array_equal(flat(after.params), flat(state.params))
    assert metrics["update_norm"] == 0 and metrics["screened_out"] == 4


def test_a_run_ends_when_the_increment_stays_small():
    method, _state, _ = fake_federation(True)
    for increments, over in ([0.4, 0.3, 9.0], True), ([0.4, 0.6, 0.1], False), ([0.4, np.nan, np.nan], False):
        held = types.SimpleNamespace(server={"increments": jnp.array(increments)})
        assert bool(method.converged(held)) is over
