"""The labelled and the unlabelled phase against NumPy: who trains on what, with which rate, and what is told."""

import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import UserError, base_config
from fedjax_ssl.client import STANDARD, At, Batches, acr
from fedjax_ssl.client.deck import Batch
from fedjax_ssl.client.on_labels import adjustment_of, class_shares
from fedjax_ssl.client.self_training import pass_views
from fedjax_ssl.config import apply_arguments
from fedjax_ssl.engine.interface import Previous
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.frames import PRIOR
from fedjax_ssl.models import Outputs
from fedjax_ssl.run.validation import validate
from tests.helpers.consistency_by_hand import batches
from tests.helpers.linear_network import at_rest, divided, in_numpy, sgd_step, softmax
from tests.helpers.small_problem import (
    CLASSES,
    SmallNetwork,
    assert_model,
    federation,
    handed_on,
    memory_of,
    mirrored,
    negative,
    phases_of,
    pixels_of,
    predicted,
    prepare,
    probabilities,
    running_mean,
    sent_down,
    small_problem,
    statistics_of,
    train,
)
from tests.helpers.trainers import Seen, make_trainer
from tests.helpers.trainers_by_hand import FixMatch, FlexMatch

LABELLED, UNLABELLED, BOTH = range(3)
TAU = 0.7


@pytest.fixture(scope="module")
def data():
    return federation([[0, 2, 1, 0, 0], [-1] * 8, [1, -1, -1, 0, -1, -1]])


class Round(NamedTuple):
    """One client's round: of each phase its job and what it leaves."""

    problem: Any
    received: Any
    own: Any
    first: Any
    after_labels: Any
    second: Any
    finished: Any


def build(**fields):
    problem = small_problem("fedavg_semi", **{"confidence.kind": "fixed", "confidence.threshold": TAU, **fields})
    validate(problem.config)
    return problem, METHODS["fedavg_semi"].factory(problem)


def run(data, client, own=None, **fields):
    problem, method = build(**fields)
    received, own = sent_down(problem), own or memory_of(problem, data, client)
    first, after_labels = train(phases_of(method)[0], received, data, client, own=own)
    own = {**own, **first.own, **after_labels.own}
    second, finished = train(
        phases_of(method)[1], received, data, client, own=own, previous=handed_on(first, after_labels)
    )
    return Round(problem, received, {**own, **second.own, **finished.own}, first, after_labels, second, finished)


def gradient_of(model, x, targets, added=0.0):
    """sum_i sum_c -t_ic log softmax(z + added)_c of centred pixels x, and its gradient."""
    p = softmax(x @ model["kernel"] + model["bias"] + added)
    wrong = p * targets.sum(axis=1, keepdims=True) - targets
    return -np.sum(targets * np.log(p)), {"bias": wrong.sum(axis=0), "kernel": x.T @ wrong}


def labelled_by_hand(result, data, views=(mirrored,), added=0.0, velocity=None):
    """Two epochs of cross-entropy on the labelled images: the model, its statistics, the velocity, each step's loss."""
    config, deck = result.problem.config.client, result.first.work.decks["labelled"]
    model, statistics, losses = in_numpy(result.received.model.params), statistics_of(result.received.model), []
    velocity = velocity or at_rest(model)
    for batch in batches(np.asarray(deck.order), int(deck.size), config.batch_size):
        rows = np.asarray(deck.rows)[batch]
        targets = np.eye(CLASSES)[np.asarray(data.visible_labels)[rows]] / len(rows) / len(views)
        x = [pixels_of(data, rows, view) for view in views]
        found = [gradient_of(model, one - one.mean(axis=0), targets, added) for one in x]
        gradient = {name: sum(g[name] for _, g in found) for name in model}
        model, velocity = sgd_step(model, gradient, velocity, config, config.learning_rate)
        statistics = running_mean(statistics, *x)
        losses.append(sum(loss for loss, _ in found))
    return model, statistics, velocity, losses


def unlabelled_by_hand(result, data, rule, before, config=None, local=False, prior=None):
    """Two epochs on the pseudo-labels, by p / prior, after `before`: (model, statistics, velocity, ...)."""
    config, deck = config or result.problem.config.client, result.second.work.decks["unlabelled"]
    received, at_first = in_numpy(result.received.model.params), statistics_of(result.received.model)
    model, statistics, velocity = before[:3]
    weights_of_all, losses = [], []
    for batch in batches(np.asarray(deck.order), int(deck.size), config.batch_size):
        rows = np.asarray(deck.rows)[batch]
        weak, strong = pixels_of(data, rows, mirrored), pixels_of(data, rows, negative)
        labelling = (model, weak, weak.mean(axis=0)) if local else (received, weak, at_first)
        p = probabilities(*labelling)
        p = p if prior is None else divided(p, prior)
        weights = rule.weigh(p, batch)
        targets = np.eye(CLASSES)[p.argmax(axis=1)] * weights[:, None] / len(rows)
        loss, gradient = gradient_of(model, strong - strong.mean(axis=0), targets)
        model, velocity = sgd_step(model, gradient, velocity, config, config.learning_rate)
        statistics = running_mean(statistics, weak, strong)
        weights_of_all += list(weights)
        losses.append(loss)
    return model, statistics, velocity, losses, np.array(weights_of_all)


def nothing_trained(result):
    model = in_numpy(result.received.model.params)
    return model, statistics_of(result.received.model), at_rest(model)


def assert_told(result, labelled, accepted):
    told = result.finished.upload.metadata
    assert set(told) == {"labelled", "accepted"}
    np.testing.assert_allclose([told["labelled"], told["accepted"]], [labelled, accepted], rtol=1e-6)


@pytest.mark.test_all
def test_who_has_labels_alone_hands_its_model_through(data):
    result = run(data, LABELLED)
    assert (result.first.num_steps, result.second.num_steps, result.second.takes_part) == (4, 0, True)
    model, statistics, _, losses = labelled_by_hand(result, data)
    assert_model(result.finished.upload.model, model, statistics)
    np.testing.assert_allclose(result.after_labels.metrics["labelled_loss"], np.mean(losses), rtol=1e-5)
    assert_told(result, labelled=5, accepted=0)


@pytest.mark.test_all
def test_who_has_no_label_trains_on_those_of_the_received_model(data):
    result = run(data, UNLABELLED)
    assert (result.first.num_steps, result.second.num_steps) == (0, 6)
    model, statistics, _, losses, weights = unlabelled_by_hand(result, data, FixMatch(TAU), nothing_trained(result))
    assert_model(result.finished.upload.model, model, statistics)
    assert_told(result, labelled=0, accepted=weights.sum())
    assert 0 < weights.sum() < 16
    of_batches = np.split(weights, [3, 6, 8, 11, 14])
    found = [result.finished.metrics[name] for name in ("unlabelled_loss", "mean_weight")]
    np.testing.assert_allclose(found, [np.mean(losses), np.mean([own.mean() for own in of_batches])], rtol=1e-4)


def test_labels_of_the_model_in_training(data):
    result = run(data, UNLABELLED, **{"confidence.labels_from": "local"})
    model, statistics, *_, weights = unlabelled_by_hand(
        result, data, FixMatch(TAU), nothing_trained(result), local=True
    )
    assert_model(result.finished.upload.model, model, statistics)
    assert_told(result, labelled=0, accepted=weights.sum())


@pytest.mark.parametrize("labels_from", ["received", "local"])
def test_labels_without_the_client_s_prior(data, labels_from):
    """FedDB's: whichever model labels, its probabilities are divided by the received one's mean."""
    result = run(data, BOTH, **{"confidence.labels_from": labels_from, "confidence.debias": "app_u"})
    rows = np.asarray(data.client_index[BOTH])[[1, 2, 4, 5]]  # without labels
    p = predicted(result.received.model, pixels_of(data, rows, mirrored))
    labels = np.asarray(result.second.work.labels.report.labels)[[1, 2, 4, 5]]
    np.testing.assert_array_equal(labels, divided(p, p.mean(axis=0)).argmax(axis=1))
    assert np.any(labels != p.argmax(axis=1))
    before = labelled_by_hand(result, data)
    before = (*before[:2], at_rest(before[0]))
    local = labels_from == "local"
    by_hand = unlabelled_by_hand(result, data, FixMatch(TAU), before, local=local, prior=p.mean(axis=0))
    model, statistics, *_, weights = by_hand
    assert_model(result.finished.upload.model, model, statistics)
    assert_told(result, labelled=2, accepted=weights.sum())


def test_who_has_both_trains_on_one_after_the_other(data):
    result = run(data, BOTH)
    before = labelled_by_hand(result, data)
    before = (*before[:2], at_rest(before[0]))  # each phase has a fresh optimiser
    model, statistics, *_, weights = unlabelled_by_hand(result, data, FixMatch(TAU), before)
    assert_model(result.finished.upload.model, model, statistics)
    assert_told(result, labelled=2, accepted=weights.sum())


def test_an_optimiser_that_survives_rounds_is_one_for_both_phases(data):
    result = run(data, BOTH, **{"client.persistent": True})
    model, *_ = unlabelled_by_hand(result, data, FixMatch(TAU), labelled_by_hand(result, data)[:3])
    assert_model(result.finished.upload.model, model)
    again = run(data, BOTH, own=result.own, **{"client.persistent": True})
    _, _, velocity, *_ = unlabelled_by_hand(result, data, FixMatch(TAU), labelled_by_hand(result, data)[:3])
    before = labelled_by_hand(again, data, velocity=velocity)
    model, *_ = unlabelled_by_hand(again, data, FixMatch(TAU), before[:3])
    assert_model(again.finished.upload.model, model)


def test_rate_and_clipping_by_role(data):
    fields = {"client.unlabelled_learning_rate": 0.1, "client.unlabelled_clip_norm": 0.05}
    result = run(data, BOTH, **fields)
    config = result.problem.config.client
    of_role = types.SimpleNamespace(
        learning_rate=0.1, clip_norm=0.05, momentum=config.momentum, weight_decay=config.weight_decay,
        nesterov=config.nesterov, batch_size=config.batch_size,
    )  # fmt: skip
    before = labelled_by_hand(result, data)
    assert_model(result.after_labels.upload.model, before[0])  # at the rate of both
    before = (*before[:2], at_rest(before[0]))
    assert_model(result.finished.upload.model, unlabelled_by_hand(result, data, FixMatch(TAU), before, of_role)[0])
    # A schedule moves both alike.
    problem, method = build(**fields)
    halved = result.received._replace(learning_rate=result.received.learning_rate / 2)
    job, finished = train(
        phases_of(method)[1], halved, data, UNLABELLED, own=memory_of(problem, data, UNLABELLED),
        previous=Previous(jax.tree.map(lambda x: x[None], result.after_labels.upload), jnp.array([False])),
    )  # fmt: skip
    half = result._replace(problem=problem, second=job)
    of_role.learning_rate = 0.05
    expected = unlabelled_by_hand(half, data, FixMatch(TAU), nothing_trained(half), of_role)
    assert_model(finished.upload.model, expected[0])


@pytest.mark.parametrize("counted", ["trained_on", "confident"])
def test_what_is_told_of_pseudo_labels(data, counted):
    """FlexMatch trains on more than it stores."""
    result = run(data, UNLABELLED, **{"confidence.kind": "flexmatch", "confidence.accepted": counted})
    rule = FlexMatch(TAU, 8, CLASSES)
    weights = unlabelled_by_hand(result, data, rule, nothing_trained(result))[-1]
    confident = 2 * len(rule.stored)  # two passes
    assert confident < weights.sum()
    assert_told(result, labelled=0, accepted=weights.sum() if counted == "trained_on" else confident)


@pytest.mark.parametrize("memory", ["round", "run"])
def test_counters_last_for_a_round_or_for_the_run(data, memory):
    fields = {"confidence.kind": "flexmatch", "confidence.memory": memory}
    once = run(data, UNLABELLED, **fields)
    rule = FlexMatch(TAU, 8, CLASSES)
    unlabelled_by_hand(once, data, rule, nothing_trained(once))
    stored = [rule.stored.get(place, -1) for place in range(8)]
    np.testing.assert_array_equal(once.own["confidence"][:8], stored)
    twice = run(data, UNLABELLED, own=once.own, **fields)
    if memory == "round":
        rule = FlexMatch(TAU, 8, CLASSES)
    model, *_, weights = unlabelled_by_hand(twice, data, rule, nothing_trained(twice))
    assert_model(twice.finished.upload.model, model)
    assert_told(twice, labelled=0, accepted=weights.sum())
    assert (weights[0] == 1) or memory == "run"


def test_the_report_names_confident_labels(data):
    result = run(data, BOTH)
    rows = np.asarray(data.client_index[BOTH])[:6]
    p = predicted(result.received.model, pixels_of(data, rows, mirrored))
    np.testing.assert_array_equal(result.second.work.labels.report.labels[:6], p.argmax(axis=1))
    known = np.asarray(data.visible_labels)[rows] >= 0
    np.testing.assert_array_equal(result.second.work.labels.report.qualified[:6], known | (p.max(axis=1) >= TAU))
    assert not np.any(result.second.work.labels.report.qualified[6:])


# --- Logit adjustment. -----------------------------------------------------------------------------------------------


def test_the_balanced_softmax_of_a_client_on_both_views(data):
    """Class 1 has one image, class 2 one, class 0 three."""
    fields = {"client.logit_adjustment": 1.5, "client.labelled_views": "both"}
    result = run(data, LABELLED, **fields)
    added = 1.5 * np.log([3 / 5, 1 / 5, 1 / 5])
    model, statistics, *_ = labelled_by_hand(result, data, views=(mirrored, negative), added=added)
    assert_model(result.finished.upload.model, model, statistics)


def test_an_absent_class_has_half_an_image():
    found = class_shares(jnp.array([[3.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), base_config().client)
    np.testing.assert_allclose(found[0], np.array([3, 0.5, 1]) / 4.5, rtol=1e-6)
    np.testing.assert_allclose(found[1], [1 / 3] * 3, rtol=1e-6)  # of a client without labels: no matter


@pytest.mark.parametrize("images", [5, 6621])
def test_semianagg_s_code_adds_a_tiny_share(images):
    """Whatever the client's size, an absent class has log 1e-12; here as the loss gets it."""
    config = apply_arguments(base_config(), "semianagg,code")
    problem = small_problem("semianagg,code")
    labels = jnp.array([[0] * (images - 2) + [2, 2]])
    adjustment = adjustment_of(problem, types.SimpleNamespace(labels=labels))
    expected = [np.log(1 - 2 / images), -27.63102, np.log(2 / images)]
    np.testing.assert_allclose(adjustment[0], expected, rtol=1e-5, atol=1e-7)
    validate(config)
    with pytest.raises(UserError, match=r"client\.share_offset must be at least 0"):
        config.client.share_offset = -1.0
        validate(config)


# --- ACR's phases. ---------------------------------------------------------------------------------------------------


def prior_of(problem, data):
    """What clients are sent of the labelled images."""
    init = METHODS["fedavg_semi"].factory(problem).init
    return jax.jit(lambda data: init(data, jax.random.key(0)).server[PRIOR])(data)


def test_a_class_without_labels_takes_no_image_from_the_others():
    """The labelled client has no image of class 2; with a share of 0 every label would be 2."""
    problem = small_problem("fedavg_semi", SmallNetwork(STANDARD, head_dim=CLASSES), **{"confidence.kind": "acr"})
    prior = prior_of(problem, federation([[0, 1, 0, 0], [-1] * 8]))
    np.testing.assert_allclose(prior, np.array([3, 1, 0.5]) / 4.5, rtol=1e-6)
    sure = 8 * jnp.eye(CLASSES)
    seen = Seen(Outputs(sure, {STANDARD: sure}, ()), Batch(*[np.arange(3)] * 2, np.ones(3, bool), 0), 8, prior)
    trainer = make_trainer(problem)
    targets, _ = jax.jit(lambda state: trainer.targets(state, seen))(trainer.init(8))
    for target in targets:
        np.testing.assert_array_equal(target.labels, [0, 1, 2])

    received = sent_down(problem, prior)
    loss = acr.loss_on_labels(problem, "labelled_loss")
    rows = np.array([1, 2, 3])
    small = federation([[0, 1, 0, 0], [-1] * 8])
    batch = Batch(rows, rows, np.ones(3, bool), 0).read(small)
    at = At(received, small, {}, None, None, {}, None, 0, 1)
    value = loss(received.model, Batches(labelled=batch), at).value
    x = pixels_of(small, rows, mirrored)
    x, params = x - x.mean(axis=0), in_numpy(received.model.params)
    standard = x @ np.asarray(received.model.params[STANDARD]["kernel"], float) + 0.1 * params["bias"].sum()
    balanced = x @ params["kernel"] + params["bias"] + 2 * np.log(np.array([3, 1, 0.5]) / 4.5)
    expected = -sum(np.log(softmax(z)[np.arange(3), [0, 1, 0]]).mean() for z in (standard, balanced))
    np.testing.assert_allclose(value, expected, rtol=1e-4)


def test_acr_labels_by_both_classifiers_of_the_received_model(data):
    """In tests/official are labels of the model in training, and both classifiers' training."""
    problem = small_problem("fedavg_semi", SmallNetwork(STANDARD, head_dim=CLASSES), **{"confidence.kind": "acr"})
    phases, own = phases_of(METHODS["fedavg_semi"].factory(problem)), memory_of(problem, data, UNLABELLED)
    received = sent_down(problem, prior_of(problem, data))
    idle = handed_on(*train(phases[0], received, data, UNLABELLED, own=own))
    work = prepare(phases[1], received, data, UNLABELLED, own=own, previous=idle).work
    batch = work.decks["unlabelled"].batch(0, 3).read(data)
    at = At(received, data, work.decks, work.labels, None, own, jax.random.key(0), 0, 1)
    other = sent_down(problem, seed=7).model  # in training
    seen = pass_views(problem, other, Batches(unlabelled=batch), at, strong_views=2).labelling
    x = pixels_of(data, batch.rows, mirrored) - statistics_of(received.model)
    params, kernel = in_numpy(received.model.params), np.asarray(received.model.params[STANDARD]["kernel"], float)
    np.testing.assert_allclose(seen.logits, x @ params["kernel"] + params["bias"], atol=1e-5)
    np.testing.assert_allclose(seen.heads[STANDARD], x @ kernel + 0.1 * params["bias"].sum(), atol=1e-5)


@pytest.mark.parametrize("field", ["client.logit_adjustment", "client.share_offset"])
def test_acr_has_labelled_losses_of_its_own(field):
    with pytest.raises(UserError, match=r"confidence\.kind='acr' has a loss of its own on labelled images"):
        build(**{"confidence.kind": "acr", field: 1.0})
