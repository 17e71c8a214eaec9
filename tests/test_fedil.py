"""FedIL's rules against plain Python and NumPy: local training, the counts, the screening, the end of a run."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import TINY_BACKBONE
from conftest import make_fedanchor_config as make_tiny_config
from fedjax_ssl import State
from fedjax_ssl.config import apply_arguments
from fedjax_ssl.engine.interface import Cohort, ModelUpload, Received
from fedjax_ssl.methods import fedil
from fedjax_ssl.methods.fedil import Broadcast, Credibility, advance
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.server.training import ServerModel
from linear_network import LinearNetwork, at_rest, in_numpy, loss_and_gradient, probabilities, sgd_step


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


def local_training_by_hand(config, start, server, centres, images, order, credibility, drawn):
    """Eq. 12 to 21 for one client: a loop over unpadded batches, and over what each of its images is told.

    Args:
        config: the run's.
        start, server: theta' and theta_0; `centres` are their two statistics.
        images: float64 [n, 8, 8] in 0..1.
        order: int [E, n].
        credibility: label, count and membership before, each [n].
        drawn: which of the set's members are in each batch, [10].

    Returns:
        The model, the credibility, the losses (client, xi_a, xi_b, xi_c) of each step, and the verdicts on each label
        that was counted: (confident, agreed with).
    """
    options, model, velocity = config.fedil, dict(start), at_rest(start)
    label, count, member = (np.array(leaf) for leaf in credibility)
    members = np.flatnonzero(credibility.in_set)  # the set as it is when the round begins, and its labels
    set_labels = np.asarray(credibility.label)
    weak, strong = images[:, :, ::-1].reshape(len(images), -1), 1 - images.reshape(len(images), -1)
    one_hot, losses, verdicts = np.eye(10), [], []
    for epoch in range(len(order)):
        for first in range(0, len(images), config.client.batch_size):
            batch = order[epoch, first : first + config.client.batch_size]
            of_weak = probabilities(model, weak[batch], weak[batch].mean(axis=0))
            of_server = probabilities(server, weak[batch], centres[1])
            if options.labels_from == "global":
                of_weak = probabilities(start, weak[batch], centres[0])
            found, confident = of_weak.argmax(axis=1), of_weak.max(axis=1) >= options.threshold
            from_set = members[drawn[: len(batch)]]
            terms = [
                loss_and_gradient(model, strong[batch], one_hot[found] * confident[:, None]),
                loss_and_gradient(model, weak[batch], of_server),
                loss_and_gradient(model, weak[from_set], one_hot[set_labels[from_set]]),
            ]
            weights = (1, options.kl_weight, 1)
            xi = [loss for loss, _ in terms]
            xi[1] += np.mean(np.sum(of_server * np.log(of_server), axis=1))  # KL is cross-entropy less an entropy
            losses.append([np.dot(weights, xi), *xi])
            gradient = {name: sum(w * g[name] for w, (_, g) in zip(weights, terms)) for name in model}
            model, velocity = sgd_step(model, gradient, velocity, config.client, config.client.learning_rate)
            if options.count_per == "round" and epoch < len(order) - 1:
                continue
            agreed = of_server.argmax(axis=1) == found
            verdicts += zip(confident, agreed)
            for i, now, credible in zip(batch, found, confident & agreed):
                if member[i]:
                    continue
                count[i] = 0 if not credible else count[i] + 1 if count[i] and label[i] == now else 1
                label[i], member[i] = now, count[i] >= options.successive
    return model, (label, count, member), losses, verdicts


@pytest.mark.parametrize("labels_from, count_per", [("local", "round"), ("global", "epoch")])
def test_local_training_is_that_of_the_equations(labels_from, count_per, monkeypatch):
    """Two epochs of a client whose set has members, for a linear model and views that draw nothing."""
    config = apply_arguments(make_tiny_config(**{"model.name": TINY_BACKBONE, "client.learning_rate": 0.3}), "fedil")
    config.fedil.update(
        {"labels_from": labels_from, "count_per": count_per, "threshold": 0.4, "successive": 3, "kl_weight": 0.7}
    )
    experiment = build_experiment(config)
    network, data, client = LinearNetwork(64, 10), experiment.data, 5
    problem = experiment.problem._replace(
        network=network, weak=lambda key, images: images[:, :, ::-1], strong=lambda key, images: 255 - images
    )
    phase = fedil.fedil(problem).phases[0]
    drawn = lambda size, count: (2 + 3 * jnp.arange(count)) % size  # noqa: E731
    monkeypatch.setattr(fedil, "draw_with_replacement", lambda key, size, count: drawn(size, count))

    rng = np.random.default_rng(3)
    (start, _), (noise, _) = network.init(jax.random.key(1)), network.init(jax.random.key(2))
    server = jax.tree.map(lambda leaf, other: leaf + 0.7 * other, start, noise)
    centres = rng.uniform(0, 0.6, (2, 64)).astype(np.float32)
    broadcast = Broadcast(start, centres[0], ServerModel(server, centres[1]), jnp.float32(config.client.learning_rate))
    images = np.asarray(data.images)[np.asarray(data.client_index[client])][..., 0] / 255.0
    of_server = probabilities(in_numpy(server), images[:, :, ::-1].reshape(33, 64), centres[1]).argmax(axis=1)
    label = np.where(np.arange(33) % 3 == 0, rng.integers(0, 10, 33), of_server)
    before = Credibility(*map(jnp.int32, (label, rng.integers(0, 3, 33))), jnp.arange(33) % 4 == 1)

    states = {"credibility": before}
    cohort = Cohort(jnp.array([client]), jax.tree.map(lambda leaf: leaf[None], states), jax.random.key(4))
    jobs = jax.jit(lambda broadcast, data: phase.prepare(broadcast, data, cohort, None))(broadcast, data)
    work, step = jax.tree.map(lambda leaf: leaf[0], jobs.work), jax.jit(phase.step)
    carry = phase.start(broadcast, work, states)
    for index in range(8):
        carry = step(broadcast, data, work, carry, index, cohort.key)
    finished = phase.finish(broadcast, work, carry, 8)

    order, batch = np.asarray(work.order), np.asarray(drawn(before.in_set.sum(), 10))
    model, credibility, losses, verdicts = local_training_by_hand(
        config, in_numpy(start), in_numpy(server), centres, images, order, before, batch
    )
    assert jobs.num_steps[0] == len(losses) == 8
    assert len(set(verdicts)) == 4  # confident or not, agreed with or not
    for name, leaf in in_numpy(finished.upload.params).items():
        np.testing.assert_allclose(leaf, model[name], atol=1e-5)
    names = ("client_loss", "pseudo_loss", "kl_loss", "set_loss")
    np.testing.assert_allclose([finished.metrics[name] for name in names], np.mean(losses, axis=0), rtol=1e-5)
    for found, expected in zip(finished.state["credibility"], credibility):
        np.testing.assert_array_equal(found, expected)
    assert before.in_set.sum() < sum(credibility[2]) < 33  # some joined


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
