"""Adaptive thresholds against NumPy written from their papers' equations."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import TINY_BACKBONE
from conftest import make_fedanchor_config as make_tiny_config
from fedjax_ssl.client.thresholds import class_thresholds, qualify
from fedjax_ssl.config import apply_arguments
from fedjax_ssl.engine.round import make_round
from fedjax_ssl.run.experiment import build_experiment, initialise


@pytest.fixture(scope="module")
def client():
    """Probabilities of 30 examples over 5 classes, class 3 rare, the last 7 rows padding."""
    rng = np.random.default_rng(0)
    logits = 3 * rng.normal(size=(30, 5)) - np.array([0, 0, 0, 4, 0])
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return scores.astype(np.float32), np.arange(30) < 23


def options(kind):
    return types.SimpleNamespace(kind=kind, momentum=0.75)


def test_fixed_and_client_mean(client):
    scores, there = client
    np.testing.assert_allclose(class_thresholds(options("fixed"), 0.9, scores, there, {})[0], [0.9] * 5)
    found, kept = class_thresholds(options("client_mean"), 0.9, scores, there, {})
    np.testing.assert_allclose(found, [scores[:23].max(axis=1).mean()] * 5, rtol=1e-6)
    assert kept == {}


def test_self_adaptive(client):
    scores, there = client
    level, by_class = scores[:23].max(axis=1).mean(), scores[:23].mean(axis=0)
    found, _ = class_thresholds(options("sat"), 0.9, scores, there, {})
    np.testing.assert_allclose(found, level * by_class / by_class.max(), rtol=1e-6)
    # Negative cosines are no share, and a class without anchors (-inf) has the threshold 0.
    cosines = 2 * scores - 1
    cosines[:, 2] = -np.inf
    found, _ = class_thresholds(options("sat"), 0.9, cosines, there, {})
    by_class = np.maximum(cosines[:23], 0).mean(axis=0)
    np.testing.assert_allclose(found, cosines[:23].max(axis=1).mean() * by_class / by_class.max(), rtol=1e-5)
    assert found[2] == 0


def test_freematch_s_averages_start_with_the_first_round(client):
    scores, there = client
    states = {"threshold": {"level": np.float32(0), "by_class": np.zeros(5, np.float32), "rounds": np.int32(0)}}
    level = by_class = None
    for shift in (0, 5, 10):
        rolled = np.roll(scores, shift, axis=0)
        found, states = class_thresholds(options("freematch"), 0.9, rolled, there, states)
        now = rolled[:23].max(axis=1).mean(), rolled[:23].mean(axis=0)
        level = now[0] if level is None else 0.75 * level + 0.25 * now[0]
        by_class = now[1] if by_class is None else 0.75 * by_class + 0.25 * now[1]
        np.testing.assert_allclose(found, level * by_class / by_class.max(), rtol=1e-5)
    assert states["threshold"]["rounds"] == 3


def test_flexmatch(client):
    scores, there = client
    found, _ = class_thresholds(options("flexmatch"), 0.6, scores, there, {})
    labels, best = scores[:23].argmax(axis=1), scores[:23].max(axis=1)
    learned = np.array([np.sum((labels == c) & (best > 0.6)) for c in range(5)])
    beta = learned / max(learned.max(), 23 - learned.sum())
    np.testing.assert_allclose(found, 0.6 * beta / (2 - beta), rtol=1e-6)
    assert 0 < found.max() <= 0.6 + 1e-6 and found.min() < found.max()
    # With no confident example every threshold is 0, as the paper intends.
    np.testing.assert_array_equal(class_thresholds(options("flexmatch"), 1.0, scores, there, {})[0], np.zeros(5))


@pytest.mark.parametrize("kind", ["fixed", "client_mean", "sat", "flexmatch", "freematch"])
def test_a_client_without_examples_has_finite_thresholds(kind):
    states = {"threshold": {"level": np.float32(0), "by_class": np.zeros(5, np.float32), "rounds": np.int32(0)}}
    found, _ = class_thresholds(options(kind), 0.5, np.full((4, 5), 0.2, np.float32), np.zeros(4, bool), states)
    assert np.all(np.isfinite(found))


def test_each_label_is_held_to_its_class(client):
    scores, _ = client
    thresholds = np.array([0.3, 0.5, 0.7, 0.1, 0.9], np.float32)
    labels, qualified = qualify(scores, thresholds, strictly=False)
    np.testing.assert_array_equal(labels, scores.argmax(axis=1))
    expected = [row.max() >= thresholds[row.argmax()] for row in scores]
    np.testing.assert_array_equal(qualified, expected)


def test_the_averages_of_a_client_that_trained_on_nothing_are_kept():
    """Every client that labelled has its new averages; only who trained has another optimiser's state."""
    fields = {"threshold.kind": "freematch", "client.persistent": True, "semifl.label_views": 0, "semifl.mixup": False}
    experiment = build_experiment(
        apply_arguments(make_tiny_config(**fields, **{"model.name": TINY_BACKBONE}), "semifl")
    )
    phase, data, network = experiment.method.phases[0], experiment.data, experiment.problem.network

    def prepare(broadcast, data, cohort, previous):
        jobs = phase.prepare(broadcast, data, cohort, previous)
        return jobs._replace(num_steps=jnp.where(cohort.clients < 5, 0, 2))  # as if no image of clients 0 to 4 passed

    def step(broadcast, data, work, carry, index, key):  # nothing is learned, which would take long to compile
        opt_state = jax.tree.map(lambda leaf: leaf + 1, carry.learner.opt_state)
        return carry._replace(learner=carry.learner._replace(opt_state=opt_state))

    method = experiment.method._replace(
        phases=(phase._replace(prepare=prepare, step=step),), server_after=lambda state, data, key: (state, {})
    )
    state = jax.jit(lambda data: initialise(experiment, data))(data)
    round_fn = jax.jit(make_round(experiment.problem, method, lanes=2))
    after, (metrics, *_) = round_fn(state, data, experiment.hidden_labels)

    kept = after.clients["threshold"]
    cohort = np.flatnonzero(kept["rounds"])
    assert len(cohort) == 4 and 0 < np.sum(cohort < 5) < 4 and metrics["uploads"] == np.sum(cohort >= 5)
    for client in range(8):
        scores = np.zeros((1, 10))
        if client in cohort:
            images = data.images[data.client_index[client, : data.client_size[client]]]
            scores = np.asarray(jax.nn.softmax(network.predict(state.params, state.batch_stats, images).logits))
        np.testing.assert_allclose(kept["level"][client], scores.max(axis=1).mean(), rtol=1e-4)
        np.testing.assert_allclose(kept["by_class"][client], scores.mean(axis=0), rtol=1e-4, atol=1e-7)
        steps = 2 if client in cohort and client >= 5 else 0
        for leaf in jax.tree.leaves(after.clients["opt_state"]):
            np.testing.assert_array_equal(leaf[client], np.full(leaf.shape[1:], steps))
