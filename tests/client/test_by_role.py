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
from fedjax_ssl.client.on_labels import adjustment_of
from fedjax_ssl.client.self_training import pass_views
from fedjax_ssl.config import apply_arguments
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
    loss_and_gradient,
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
    second: Any
    finished: Any


def build(**fields):
    problem = small_problem("fedavg_semi", **{"confidence.kind": "fixed", "confidence.threshold": TAU, **fields})
    validate(problem.config)
    return problem, METHODS["fedavg_semi"].factory(problem)


def run(data, client, own=None, factor=1.0, **fields):
    """`factor` is the schedule's."""
    problem, method = build(**fields)
    received, own = sent_down(problem), own or memory_of(problem, data, client)
    received = received._replace(learning_rate=factor * received.learning_rate)
    first, after_labels = train(phases_of(method)[0], received, data, client, own=own)
    own = {**own, **first.own, **after_labels.own}
    second, finished = train(
        phases_of(method)[1], received, data, client, own=own, previous=handed_on(first, after_labels)
    )
    return Round(problem, received, {**own, **second.own, **finished.own}, first, second, finished)


def labelled_by_hand(result, data):
    """Two epochs of cross-entropy on the labelled images: the model, its statistics, the velocity."""
    config, deck = result.problem.config.client, result.first.work.decks["labelled"]
    model, statistics = in_numpy(result.received.model.params), statistics_of(result.received.model)
    velocity = at_rest(model)
    for batch in batches(np.asarray(deck.order), int(deck.size), config.batch_size):
        rows = np.asarray(deck.rows)[batch]
        targets = np.eye(CLASSES)[np.asarray(data.visible_labels)[rows]] / len(rows)
        x = pixels_of(data, rows, mirrored)
        _, gradient = loss_and_gradient(model, x, x.mean(axis=0), targets)
        model, velocity = sgd_step(model, gradient, velocity, config, config.learning_rate)
        statistics = running_mean(statistics, x)
    return model, statistics, velocity


def unlabelled_by_hand(result, data, rule, before, config=None, local=False, prior=None):
    """Two epochs on the pseudo-labels, by p / prior, after `before`: (model, statistics, velocity, ...)."""
    config, deck = config or result.problem.config.client, result.second.work.decks["unlabelled"]
    received, at_first = in_numpy(result.received.model.params), statistics_of(result.received.model)
    model, statistics, velocity = before
    weights_of_all, losses = [], []
    for batch in batches(np.asarray(deck.order), int(deck.size), config.batch_size):
        rows = np.asarray(deck.rows)[batch]
        weak, strong = pixels_of(data, rows, mirrored), pixels_of(data, rows, negative)
        labelling = (model, weak, weak.mean(axis=0)) if local else (received, weak, at_first)
        p = probabilities(*labelling)
        p = p if prior is None else divided(p, prior)
        weights = rule.weigh(p, batch)
        targets = np.eye(CLASSES)[p.argmax(axis=1)] * weights[:, None] / len(rows)
        loss, gradient = loss_and_gradient(model, strong, strong.mean(axis=0), targets)
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


@pytest.mark.parametrize("labels_from", ["received", "local"])
def test_labels_without_the_client_s_prior(data, labels_from):
    """FedDB's: whichever model labels, its probabilities are divided by the received one's mean.

    This client has images of both kinds, and trains on one after the other.
    """
    result = run(data, BOTH, **{"confidence.labels_from": labels_from, "confidence.debias": "app_u"})
    unlabelled, rows = [1, 2, 4, 5], np.asarray(data.client_index[BOTH])[:6]
    p = predicted(result.received.model, pixels_of(data, rows, mirrored))
    prior = p[unlabelled].mean(axis=0)
    report, corrected = result.second.work.labels.report, divided(p, prior)
    np.testing.assert_array_equal(report.labels[:6], corrected.argmax(axis=1))
    known = np.asarray(data.visible_labels)[rows] >= 0
    np.testing.assert_array_equal(report.qualified[:6], known | (corrected.max(axis=1) >= TAU))
    assert np.any(corrected.argmax(axis=1)[unlabelled] != p.argmax(axis=1)[unlabelled])
    model, statistics, _ = labelled_by_hand(result, data)
    before = (model, statistics, at_rest(model))  # each phase has a fresh optimiser
    local = labels_from == "local"
    by_hand = unlabelled_by_hand(result, data, FixMatch(TAU), before, local=local, prior=prior)
    model, statistics, _, losses, weights = by_hand
    assert_model(result.finished.upload.model, model, statistics)
    assert_told(result, labelled=2, accepted=weights.sum())
    found = [result.finished.metrics[name] for name in ("unlabelled_loss", "mean_weight")]
    of_batches = np.split(weights, [3, 4, 7])
    np.testing.assert_allclose(found, [np.mean(losses), np.mean([own.mean() for own in of_batches])], rtol=1e-4)


def test_an_optimiser_that_survives_rounds_is_one_for_both_phases(data):
    result = run(data, BOTH, **{"client.persistent": True})
    model, *_ = unlabelled_by_hand(result, data, FixMatch(TAU), labelled_by_hand(result, data))
    assert_model(result.finished.upload.model, model)


def test_a_schedule_moves_the_rate_of_clients_without_labels(data):
    """tests/official has that rate and their clipping, in SemiAnAgg."""
    fields = {"client.unlabelled_learning_rate": 0.1, "client.unlabelled_clip_norm": 0.05}
    result = run(data, UNLABELLED, factor=0.5, **fields)
    config = result.problem.config.client.copy_and_resolve_references()
    config.update({"learning_rate": 0.05, "clip_norm": 0.05})
    expected = unlabelled_by_hand(result, data, FixMatch(TAU), nothing_trained(result), config)
    assert_model(result.finished.upload.model, expected[0])


def test_confident_labels_may_be_told_in_place_of_those_trained_on(data):
    """FlexMatch trains on more than it stores."""
    result = run(data, UNLABELLED, **{"confidence.kind": "flexmatch", "confidence.accepted": "confident"})
    rule = FlexMatch(TAU, 8, CLASSES)
    weights = unlabelled_by_hand(result, data, rule, nothing_trained(result))[-1]
    confident = 2 * len(rule.stored)  # two passes
    assert confident < weights.sum()
    assert_told(result, labelled=0, accepted=confident)


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


# --- Logit adjustment. -----------------------------------------------------------------------------------------------


def test_semianagg_s_code_adds_a_tiny_share():
    """However many images the client has, an absent class has log 1e-12; here as the loss gets it, by its factor."""
    config, images = apply_arguments(base_config(), "semianagg,code"), 6621
    problem = small_problem("semianagg,code", **{"client.logit_adjustment": 1.5})
    labels = jnp.array([[0] * (images - 2) + [2, 2]])
    adjustment = adjustment_of(problem, types.SimpleNamespace(labels=labels))
    expected = 1.5 * np.array([np.log(1 - 2 / images), -27.63102, np.log(2 / images)])
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
    seen, mask = Outputs(sure, {STANDARD: sure}, ()), np.ones(3, bool)
    *targets, _ = acr.targets(problem)(acr.first_estimate(problem), seen, mask, prior)
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
