"""CBAFed's thresholds, its views that are labelled once, its weights and residual connections, against NumPy."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import base_config
from fedjax_ssl import train as train_run
from fedjax_ssl.config import apply_arguments, validate
from fedjax_ssl.engine.interface import Received, Upload
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.cbafed import COUNTS, GIVEN, RECORD, CBAFedExtra
from fedjax_ssl.methods.cbafed.client import Acceptance, acceptance
from fedjax_ssl.methods.frames import given_labels
from tests.helpers.linear_network import at_rest, divided, in_numpy, sgd_step
from tests.helpers.runs import TINY_BACKBONE, make_fedanchor_config
from tests.helpers.small_problem import (
    CLASSES,
    NUM_CLIENTS,
    assert_model,
    federation,
    handed_on,
    itself,
    loss_and_gradient,
    phases_of,
    pixels_of,
    prepare,
    probabilities,
    running_mean,
    sent_down,
    small_problem,
    statistics_of,
    train,
)

LABELLED, SEVEN, THREE = 0, 1, 2
GIVEN_LABELS = [0, 2, 1, 1, 0]


@pytest.fixture(scope="module")
def data():
    return federation([GIVEN_LABELS, [-1] * 7, [-1] * 3, [-1] * 8])


def build(weak=itself, **fields):
    once = {"client.epochs": 1, "client.persistent": False, "client.unlabelled_learning_rate": 0.3}
    problem = small_problem("cbafed", weak=weak, **{**once, **fields})
    validate(problem.config)
    return problem, METHODS["cbafed"].factory(problem)


def extra(thresholds=(0.5, 0.5, 0.5), rare=(False, False, False), second_stage=True):
    return CBAFedExtra(Acceptance(jnp.array(thresholds), jnp.array(rare)), jnp.bool_(second_stage))


def test_the_paper_s_backbone_and_the_other_stem():
    config = apply_arguments(base_config(), "cbafed,paper")
    assert config.model.name == "resnet18_imagenet"
    assert apply_arguments(config, "resnet18").model.name == "resnet18"


# --- What clients do. ------------------------------------------------------------------------------------------------


def epochs_by_hand(problem, data, received, work, epochs, weight, every):
    """Cross-entropy on given labels in batches of 3, drawn back behind some epochs: model and statistics."""
    config, size = problem.config.client, int(work.decks["labelled"].size)
    model, statistics = in_numpy(received.model.params), statistics_of(received.model)
    velocity, record = at_rest(model), None
    for epoch in range(epochs):
        order = np.asarray(work.decks["labelled"].order)[epoch, :size]
        for first in range(0, size, 3):
            rows = np.asarray(work.decks["labelled"].rows)[order[first : first + 3]]
            x, targets = pixels_of(data, rows), np.eye(CLASSES)[np.asarray(data.visible_labels)[rows]] / len(rows)
            _, gradient = loss_and_gradient(model, x, x.mean(axis=0), targets)
            model, velocity = sgd_step(model, gradient, velocity, config, config.learning_rate)
            statistics = running_mean(statistics, x)
        if epoch > 0 and epoch % every == 0:
            old, old_statistics = record
            model = {name: (weight * old[name] + leaf) / (weight + 1) for name, leaf in model.items()}
            statistics = (weight * old_statistics + statistics) / (weight + 1)
        if epoch == 0 or epoch % every == 0:
            record = dict(model), statistics
    return model, statistics


@pytest.mark.parametrize("second_stage, weight, every", [(True, 4.0, 3), (True, 0.5, 2), (False, 4.0, 3)])
def test_a_labelled_client_is_drawn_back_to_its_record(data, second_stage, weight, every):
    """Seven epochs of two steps; in the first stage the clients' own number of epochs, even if there are more."""
    fields = {"cbafed.labelled_epochs": 7, "cbafed.local_record": weight, "cbafed.residual_every": every}
    problem, method = build(**fields, **{"client.epochs": 1 if second_stage else 8})
    received = sent_down(problem, extra(second_stage=second_stage))
    job, finished = train(phases_of(method)[0], received, data, LABELLED)
    epochs = 7 if second_stage else 8
    assert job.num_steps == 2 * epochs
    expected = epochs_by_hand(problem, data, received, job.work, epochs, weight, every)
    assert_model(finished.upload.model, *expected)
    second, sent = train(phases_of(method)[1], received, data, LABELLED, previous=handed_on(job, finished))
    assert second.num_steps == 0 and second.takes_part
    chex.assert_trees_all_equal(sent.upload.model, finished.upload.model)
    assert sent.upload.metadata["labelled"] == 5
    np.testing.assert_array_equal(sent.upload.metadata[COUNTS], np.zeros(CLASSES))


def coin(key, images):
    """A view that is mirrored or not."""
    return jnp.where(jax.random.bernoulli(key), images[:, :, ::-1], images)


def labelled_by_hand(problem, data, received, job, thresholds, rare):
    """Image by image of client `SEVEN`: the view that was drawn, its label (-1: none), the view's pixels."""
    first, centre = in_numpy(received.model.params), statistics_of(received.model)
    p, pixels = [], []
    for position in range(7):
        key = jax.random.wrap_key_data(job.work.labels.more)
        key = jax.random.fold_in(jax.random.fold_in(key, position), 0)
        row = [int(data.client_index[SEVEN, position])]
        x = pixels_of(data, row, lambda _, images, key=key: coin(key, images))
        p.append(probabilities(first, x, centre)[0])
        pixels.append(x[0])
    known = np.asarray(data.visible_labels)[np.asarray(data.client_index)[SEVEN, :7]] >= 0
    if problem.config.confidence.debias == "app_u":
        p = divided(p, np.mean(np.array(p)[~known], axis=0))
    ranked = np.argsort(-np.array(p), axis=1)
    labels = [
        best if row[best] > thresholds[best] else second if rare[second] else -1
        for row, (best, second, _) in zip(p, ranked)
    ]
    return np.where(known, -1, labels), np.array(pixels)


@pytest.mark.parametrize(
    "thresholds, rare, size",
    [
        ((0.0, 0.0, 0.0), (False, False, False), 7),  # a lone image in the third batch
        ((0.6, 0.9, 0.82), (False, False, True), 4),  # one of them with its second class
        ((0.6, 0.9, 0.7), (False, False, False), 5),  # a short batch of two
    ],
)
def test_the_views_that_were_labelled_are_trained_on(data, thresholds, rare, size):
    """One pass in batches of 3 over the accepted images, with one view each, drawn once."""
    problem, method = build(coin)
    received = sent_down(problem, extra(thresholds, rare), seed=1)
    nothing = handed_on(*train(phases_of(method)[0], received, data, SEVEN))
    job, finished = train(phases_of(method)[1], received, data, SEVEN, previous=nothing)
    labels, pixels = labelled_by_hand(problem, data, received, job, thresholds, rare)
    accepted = np.flatnonzero(labels >= 0)
    assert len(accepted) == size
    np.testing.assert_array_equal(np.flatnonzero(job.work.labels.report.qualified), accepted)
    np.testing.assert_array_equal(np.asarray(job.work.labels.report.labels)[accepted], labels[accepted])
    np.testing.assert_array_equal(finished.upload.metadata[COUNTS], np.bincount(labels[accepted], minlength=CLASSES))

    config, trained = problem.config.client, size - (size % 3 == 1)
    order = np.asarray(job.work.decks["unlabelled"].order)[0]
    assert set(order[:size]) == set(accepted) and job.num_steps == -(-trained // 3)
    model, statistics = in_numpy(received.model.params), statistics_of(received.model)
    velocity = at_rest(model)
    for first in range(0, trained, 3):
        of_batch = order[first : min(first + 3, trained)]
        x, targets = pixels[of_batch], np.eye(CLASSES)[labels[of_batch]] / len(of_batch)
        _, gradient = loss_and_gradient(model, x, x.mean(axis=0), targets)
        model, velocity = sgd_step(model, gradient, velocity, config, 0.3)
        statistics = running_mean(statistics, x)
    assert_model(finished.upload.model, model, statistics)


def test_labels_without_the_client_s_prior():
    """Which is that of its images without a label."""
    data, labels = federation([GIVEN_LABELS, [-1, -1, 1, -1, -1, 1, -1]]), {}
    for debias in ("none", "app_u"):
        problem, method = build(coin, **{"confidence.debias": debias})
        received = sent_down(problem, extra(), seed=1)
        nothing = handed_on(*train(phases_of(method)[0], received, data, SEVEN))
        job = prepare(phases_of(method)[1], received, data, SEVEN, previous=nothing)
        labels[debias], _ = labelled_by_hand(problem, data, received, job, (0.5, 0.5, 0.5), (False, False, False))
        accepted = labels[debias] >= 0
        np.testing.assert_array_equal(np.asarray(job.work.labels.report.qualified)[:7], accepted)
        np.testing.assert_array_equal(np.asarray(job.work.labels.report.labels)[:7][accepted], labels[debias][accepted])
    assert np.any(labels["none"] != labels["app_u"])


def test_nobody_trains_on_pseudo_labels_in_the_first_stage_and_a_lone_one_is_told(data):
    problem, method = build()
    received = sent_down(problem, extra((0.0, 0.0, 0.0), second_stage=False))
    nothing = handed_on(*train(phases_of(method)[0], received, data, SEVEN))
    job, _ = train(phases_of(method)[1], received, data, SEVEN, previous=nothing)
    assert job.num_steps == 0 and not job.takes_part and not np.any(job.work.labels.report.qualified)

    p = np.sort(np.max(problem.network.probabilities(received.model, data.inputs[data.client_index[THREE, :3]]), -1))
    threshold = (p[-1] + p[-2]) / 2  # one of three images is above it
    received = received._replace(extra=extra((threshold,) * 3))
    job, finished = train(phases_of(method)[1], received, data, THREE, previous=nothing)
    assert job.num_steps == 0 and job.takes_part and np.sum(finished.upload.metadata[COUNTS]) == 1
    chex.assert_trees_all_equal(finished.upload.model.params, received.model.params)


# --- The server. -----------------------------------------------------------------------------------------------------


def test_the_server_weighs_by_labels_and_is_drawn_back_to_its_record(data):
    """Seven rounds of the first stage, eight of the second; the labels of clients that are not drawn still count."""
    options = {
        "warm_up_rounds": 7,
        "residual_every": 3,
        "labelled_factor": 2.0,
        "local_record": 4.0,
        "global_record": 1.5,
    }
    problem, method = build(**{f"cbafed.{name}": value for name, value in options.items()})
    state, rng = method.init(data, jax.random.key(0)), np.random.default_rng(1)
    given = np.bincount(GIVEN_LABELS, minlength=CLASSES)
    np.testing.assert_array_equal(state.server[GIVEN], given)
    np.testing.assert_array_equal(given_labels(problem, data), given)
    remembered, record, aggregate = np.zeros((NUM_CLIENTS, CLASSES)), None, jax.jit(method.aggregate)
    clients = np.array([2, 0, 1])  # client 3 is drawn in the last rounds alone
    model = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(state.model)]
    for number in range(15):
        stage = int(number >= 7)
        if number == 13:
            clients = np.array([3, 0, 1])
        broadcast = method.broadcast(state, data, None)
        assert broadcast.extra.second_stage == bool(stage)
        options = problem.config.cbafed
        by = acceptance(jnp.array(given + remembered.sum(axis=0)), options.base, options.cap, options.rare)
        np.testing.assert_allclose(broadcast.extra.acceptance.thresholds, by.thresholds, rtol=1e-6)
        np.testing.assert_array_equal(broadcast.extra.acceptance.rare, by.rare)

        counts = rng.integers(0, 9, (3, CLASSES)) * (clients > 0)[:, None] * stage
        accepted = (clients == 0) | (stage == 1)
        if number == 12:
            accepted[2] = False  # client 1's upload is lost
        if number == 14:  # and here again, but its late upload of the round before has arrived
            clients, accepted[2] = np.array([1, 0, 1]), False
        if number == 10:
            accepted[:] = False  # all are, in a round in which the model would be drawn back
        sizes = np.int32([{0: 5, 1: 7, 2: 3, 3: 8}[client] for client in clients])
        if number == 9:
            accepted[0], sizes[0] = False, 0  # client 2 is absent: its labels of the last round still count
        tensors = [rng.normal(size=(3, *leaf.shape)).astype(np.float32) for leaf in model]
        told = {"labelled": np.where(clients == 0, 5.0, 0.0), COUNTS: counts}
        uploads = Upload(jax.tree.unflatten(jax.tree.structure(state.model), tensors), told)
        received = jax.tree.map(jnp.asarray, Received(uploads, accepted, clients, None, sizes, sizes))
        state, _ = aggregate(state, data, jax.tree.map(jnp.float32, received)._replace(
            accepted=received.accepted, clients=received.clients, sizes=received.sizes), jax.random.key(0))  # fmt: skip
        state = state._replace(round=state.round + 1)

        weights = accepted * (2.0 * told["labelled"] + counts.sum(axis=1))
        before = model
        if accepted.any():
            model = [np.tensordot(weights / weights.sum(), tensor, 1) for tensor in tensors]
        epoch = number - 7 * stage
        if epoch == 0:
            record = before if stage else model
        elif epoch % 3 == 0 and accepted.any():
            weight = (4.0, 1.5)[stage]
            record = model = [(weight * old + new) / (weight + 1) for old, new in zip(record, model)]
        for found, expected in zip(jax.tree.leaves(state.model), model):
            np.testing.assert_allclose(found, expected, atol=1e-5)
        for found, expected in zip(jax.tree.leaves(state.server[RECORD]), record):
            np.testing.assert_allclose(found, expected, atol=1e-5)
        here = sizes > 0
        remembered[clients[here]] = 0
        np.add.at(remembered, clients[here], np.where(accepted[:, None], counts, 0)[here])
        np.testing.assert_array_equal(state.server[COUNTS], remembered)
    assert remembered[2].sum() > 0 and state.round == 15


# --- A run. ----------------------------------------------------------------------------------------------------------


def test_both_stages_of_a_run(tmp_path):
    """One labelled client trains alone for two rounds; then all do."""
    config = apply_arguments(make_fedanchor_config(), "cbafed")
    config.update_from_flattened_dict({
        **METHODS["cbafed"].tiny, "model.name": TINY_BACKBONE, "augment.flavour": "none", "model.statistics": "cohort",
        "client.epochs": 1, "num_rounds": 4, "cbafed.warm_up_rounds": 2,
    })  # fmt: skip
    train_run(config, tmp_path)
    rounds = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["uploads"] for line in rounds] == [1, 1, 8, 8]
    assert [line["local_steps"] for line in rounds[:2]] == [4, 4] and rounds[2]["local_steps"] > 3 * 4
