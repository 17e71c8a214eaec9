"""FedIL's rules against plain Python and NumPy: local training, the counts, the screening, the end of a run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import State
from fedjax_ssl.engine.interface import Received, Upload
from fedjax_ssl.methods import METHODS, fedil
from fedjax_ssl.methods.fedil import CREDIBILITY
from fedjax_ssl.methods.fedil.client import Credibility, advance
from fedjax_ssl.methods.fedil.server import INCREMENTS
from fedjax_ssl.server import SERVER_MODEL
from tests.helpers.consistency_by_hand import batches
from tests.helpers.linear_network import at_rest, in_numpy, sgd_step
from tests.helpers.small_problem import (
    CLASSES,
    assert_model,
    federation,
    loss_and_gradient,
    mirrored,
    negative,
    phases_of,
    pixels_of,
    probabilities,
    running_mean,
    sent_down,
    small_problem,
    statistics_of,
    train,
)

KEY = jax.random.key(0)

SIZE, BATCH = 10, 3


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


def train_by_hand(problem, data, received, work, credibility, drawn):
    """Eq. 12 to 21 for one client: a loop over unpadded batches, and over what each of its images is told.

    Args:
        problem, data, received: those of the phase.
        work: the client's; only its order is read.
        credibility: label, count and membership before, each [n].
        drawn: which of the set's members are in each batch, [3].

    Returns:
        The model, its statistics, the credibility, the losses (client, xi_a, xi_b, xi_c) of each step, and the verdicts
        on each label that was counted: (confident, agreed with).
    """
    options, config = problem.config.fedil, problem.config.client
    start, server = in_numpy(received.model.params), in_numpy(received.extra.params)
    model, statistics, velocity = dict(start), statistics_of(received.model), at_rest(start)
    label, count, member = (np.array(leaf) for leaf in credibility)
    members = np.flatnonzero(credibility.in_set)  # the set as it is when the round begins, and its labels
    set_labels, rows = np.asarray(credibility.label), np.asarray(work.decks["unlabelled"].rows)
    weak, strong = pixels_of(data, rows, mirrored), pixels_of(data, rows, negative)
    one_hot, losses, verdicts, order = np.eye(CLASSES), [], [], np.asarray(work.decks["unlabelled"].order)
    all_batches = batches(order, SIZE, BATCH)
    for number, batch in enumerate(all_batches):
        n, centre = len(batch), weak[batch].mean(axis=0)
        of_weak = probabilities(model, weak[batch], centre)
        of_server = probabilities(server, weak[batch], statistics_of(received.extra))
        if options.labels_from == "global":
            of_weak = probabilities(start, weak[batch], statistics_of(received.model))
        found, confident = of_weak.argmax(axis=1), of_weak.max(axis=1) >= problem.config.confidence.threshold
        passes = [
            (strong[batch], one_hot[found] * confident[:, None] / n),
            (weak[batch], of_server / n),
        ]
        views = [weak[batch], strong[batch]]
        if options.label_set:
            from_set = members[drawn[:n]] if len(members) else batch
            known = one_hot[set_labels[from_set]] / n if len(members) else np.zeros((n, CLASSES))
            passes.append((weak[from_set], known))
            views.append(weak[from_set])
        terms = [loss_and_gradient(model, x, x.mean(axis=0), targets) for x, targets in passes]
        weights = (1, options.kl_weight, 1)[: len(terms)]
        xi = [loss for loss, _ in terms]
        xi[1] += np.mean(np.sum(of_server * np.log(of_server), axis=1))  # KL is cross-entropy less an entropy
        losses.append([np.dot(weights, xi), *xi, *[0] * (3 - len(xi))])
        gradient = {name: sum(w * g[name] for w, (_, g) in zip(weights, terms)) for name in model}
        model, velocity = sgd_step(model, gradient, velocity, config, config.learning_rate)
        statistics = running_mean(statistics, *views)
        if options.count_per == "round" and number < len(all_batches) // 2:
            continue
        agreed = of_server.argmax(axis=1) == found
        verdicts += zip(confident, agreed)
        for i, now, credible in zip(batch, found, confident & agreed):
            if member[i]:
                continue
            count[i] = 0 if not credible else count[i] + 1 if count[i] and label[i] == now else 1
            label[i], member[i] = now, count[i] >= options.successive
    return model, statistics, (label, count, member), losses, verdicts


@pytest.mark.parametrize(
    "labels_from, count_per, members, label_set",
    [
        ("local", "round", 4, True),
        ("global", "epoch", 4, True),
        ("local", "epoch", 0, True),
        ("local", "epoch", 4, False),
    ],
)
def test_local_training_is_that_of_the_equations(labels_from, count_per, members, label_set, monkeypatch):
    """Two epochs of a client whose set has members, or has none yet, or plays no part."""
    fields = {"labels_from": labels_from, "count_per": count_per, "label_set": label_set}
    fields |= {"successive": 2, "kl_weight": 0.7}
    problem = small_problem(
        "fedil", **{f"fedil.{name}": value for name, value in fields.items()}, **{"confidence.threshold": 0.6}
    )
    phase, data = phases_of(METHODS["fedil"].factory(problem))[0], federation([[-1], [-1] * SIZE], at_server=[0, 1])
    drawn = lambda size, count: (1 + 2 * jnp.arange(count)) % size  # noqa: E731
    monkeypatch.setattr(fedil, "draw_with_replacement", lambda key, size, count: drawn(size, count))

    rng = np.random.default_rng(3)
    received, noise = sent_down(problem), sent_down(problem, seed=7).model
    server = jax.tree.map(lambda leaf, other: leaf + 0.5 * other, received.model, noise)
    received = received._replace(extra=server)
    x = pixels_of(data, data.client_index[1], mirrored)
    of_server = probabilities(in_numpy(server.params), x, statistics_of(server)).argmax(axis=1)
    label = np.where(np.arange(SIZE) % 3 == 0, rng.integers(0, CLASSES, SIZE), of_server)
    in_set = (jnp.arange(SIZE) % 3 == 0) & (jnp.arange(SIZE) < 3 * members)
    before = Credibility(*map(jnp.int32, (label, rng.integers(0, 4, SIZE) > 0)), in_set)

    job, finished = train(phase, received, data, 1, {CREDIBILITY: before})
    by_hand = train_by_hand(problem, data, received, job.work, before, np.asarray(drawn(before.in_set.sum(), BATCH)))
    model, statistics, credibility, losses, verdicts = by_hand
    assert job.num_steps == len(losses) == 8
    assert all(set(factor) == {True, False} for factor in zip(*verdicts))  # confident or not, agreed with or not
    assert_model(finished.upload.model, model, statistics)
    names = ("client_loss", "pseudo_loss", "kl_loss", "set_loss")
    np.testing.assert_allclose([finished.metrics[name] for name in names], np.mean(losses, axis=0), atol=1e-5)
    after = finished.own[CREDIBILITY]
    for found, expected in zip(after, credibility):
        np.testing.assert_array_equal(found, expected)
    assert before.in_set.sum() < after.in_set.sum() < SIZE  # some joined
    assert np.all(after.in_set | ~before.in_set)  # nobody left, or has another label
    np.testing.assert_array_equal(after.label[before.in_set], before.label[before.in_set])


def fake_federation(screening):
    """(method, state, received): five updates of noise, one of which was not accepted."""
    fields = {"cosine_screening": screening}
    problem = small_problem(
        "fedil", **{f"fedil.{name}": value for name, value in fields.items()}, **{"confidence.threshold": 0.6}
    )
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


@pytest.mark.parametrize("screening", [True, False])
def test_updates_against_the_server_s_direction_are_left_out(screening):
    """Eq. 24 to 26 over all parameters as one vector."""
    method, state, received = fake_federation(screening)
    after, metrics = method.aggregate(state, None, received, KEY)
    theta, server = flat(state.model.params), flat(state.server[SERVER_MODEL].params)
    updates = flat(received.uploads.model.params, 5) - theta
    cosine = updates @ (server - theta) / np.linalg.norm(updates, axis=1) / np.linalg.norm(server - theta)
    counted = np.asarray(received.accepted) & ((cosine >= 0) | (not screening))
    assert counted.sum() > 0 and (not screening or counted.sum() < 4)
    np.testing.assert_allclose(flat(after.model.params), theta + updates[counted].mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(metrics["update_norm"], np.linalg.norm(updates[counted].mean(axis=0)), rtol=1e-5)
    assert ("screened_out" in metrics) == screening
    if screening:
        assert metrics["screened_out"] == 4 - counted.sum()


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


def test_two_models_go_down():
    method, state, _ = fake_federation(True)
    sent = method.broadcast(state, None, None)
    assert sent.model is state.model and sent.extra is state.server[SERVER_MODEL]
