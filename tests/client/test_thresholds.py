"""Adaptive thresholds against NumPy written from their papers' equations."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import base_config
from fedjax_ssl.client import Examples, label_cohort, own_thresholds, qualify
from fedjax_ssl.client.thresholds import class_thresholds
from fedjax_ssl.engine.interface import Cohort, Problem
from tests.helpers.toy_federation import federation


@pytest.fixture(scope="module")
def client():
    """Probabilities of 30 examples over 5 classes, class 3 rare, the last 7 rows padding."""
    rng = np.random.default_rng(0)
    logits = 3 * rng.normal(size=(30, 5)) - np.array([0, 0, 0, 4, 0])
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return scores.astype(np.float32), np.arange(30) < 23


def options(kind, share=0.5):
    return types.SimpleNamespace(kind=kind, momentum=0.75, share=share)


def test_fixed_and_client_mean(client):
    scores, present = client
    np.testing.assert_allclose(class_thresholds(options("fixed"), 0.9, scores, present, {})[0], [0.9] * 5)
    found, memory = class_thresholds(options("client_mean"), 0.9, scores, present, {})
    np.testing.assert_allclose(found, [scores[:23].max(axis=1).mean()] * 5, rtol=1e-6)
    assert memory == {}


@pytest.mark.parametrize(("share", "count"), [(0.01, 0), (0.1, 2), (0.5, 12), (0.99, 23), (1.0, 23)])
def test_a_share_of_the_examples(client, share, count):
    """So many of the largest scores, to the nearest whole number of 23; the same whether 'above' or 'at' is asked."""
    scores, present = client
    found, memory = class_thresholds(options("share", share), 0.9, scores, present, {})
    best = scores[:23].max(axis=1)
    for strictly in (False, True):
        counted = np.asarray(qualify(scores, found, strictly)[1])[:23]
        assert counted.sum() == count
        assert count in (0, 23) or best[counted].min() > best[~counted].max()
    assert memory == {} and len(set(np.asarray(found))) == 1


def test_self_adaptive(client):
    scores, present = client
    level, by_class = scores[:23].max(axis=1).mean(), scores[:23].mean(axis=0)
    found, _ = class_thresholds(options("sat"), 0.9, scores, present, {})
    np.testing.assert_allclose(found, level * by_class / by_class.max(), rtol=1e-6)
    # Negative cosines are no share, and a class without anchors (-inf) has the threshold 0.
    cosines = 2 * scores - 1
    cosines[:, 2] = -np.inf
    found, _ = class_thresholds(options("sat"), 0.9, cosines, present, {})
    by_class = np.maximum(cosines[:23], 0).mean(axis=0)
    np.testing.assert_allclose(found, cosines[:23].max(axis=1).mean() * by_class / by_class.max(), rtol=1e-5)
    assert found[2] == 0


def test_freematch_s_averages_start_with_the_first_round(client):
    scores, present = client
    memory = {"threshold": {"level": np.float32(0), "by_class": np.zeros(5, np.float32), "rounds": np.int32(0)}}
    level = by_class = None
    for shift in (0, 5, 10):
        rolled = np.roll(scores, shift, axis=0)
        found, memory = class_thresholds(options("freematch"), 0.9, rolled, present, memory)
        now = rolled[:23].max(axis=1).mean(), rolled[:23].mean(axis=0)
        level = now[0] if level is None else 0.75 * level + 0.25 * now[0]
        by_class = now[1] if by_class is None else 0.75 * by_class + 0.25 * now[1]
        np.testing.assert_allclose(found, level * by_class / by_class.max(), rtol=1e-5)
    assert memory["threshold"]["rounds"] == 3


def test_flexmatch(client):
    scores, present = client
    found, _ = class_thresholds(options("flexmatch"), 0.6, scores, present, {})
    labels, best = scores[:23].argmax(axis=1), scores[:23].max(axis=1)
    learned = np.array([np.sum((labels == c) & (best > 0.6)) for c in range(5)])
    beta = learned / max(learned.max(), 23 - learned.sum())
    np.testing.assert_allclose(found, 0.6 * beta / (2 - beta), rtol=1e-6)
    assert 0 < found.max() <= 0.6 + 1e-6 and found.min() < found.max()
    # With no confident example every threshold is 0, as the paper intends.
    np.testing.assert_array_equal(class_thresholds(options("flexmatch"), 1.0, scores, present, {})[0], np.zeros(5))


@pytest.mark.parametrize("kind", ["fixed", "client_mean", "sat", "flexmatch", "freematch"])
def test_a_client_without_examples_has_finite_thresholds(kind):
    memory = {"threshold": {"level": np.float32(0), "by_class": np.zeros(5, np.float32), "rounds": np.int32(0)}}
    found, _ = class_thresholds(options(kind), 0.5, np.full((4, 5), 0.2, np.float32), np.zeros(4, bool), memory)
    assert np.all(np.isfinite(found))


def test_each_label_is_held_to_its_class(client):
    scores, _ = client
    thresholds = np.array([0.3, 0.5, 0.7, 0.1, 0.9], np.float32)
    labels, qualified = qualify(scores, thresholds, strictly=False)
    np.testing.assert_array_equal(labels, scores.argmax(axis=1))
    expected = [row.max() >= thresholds[row.argmax()] for row in scores]
    np.testing.assert_array_equal(qualified, expected)


def test_the_averages_are_the_client_s_memory():
    """Labelling reads each client's row of the memory, and gives its new averages back; who was not there keeps its."""
    config = base_config()
    config.num_clients, config.threshold.kind = 3, "freematch"
    problem = Problem(config, None, None, None, 4)
    memory = own_thresholds(problem)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(memory)} == {3}
    assert own_thresholds(problem._replace(config=base_config())) == {}
    data, momentum = federation([[8, 2], [5], [9, 1, 4]]), config.threshold.momentum
    old = {"level": jnp.array([0.1, 0.2, 0.3]), "by_class": 0.05 * jnp.arange(12.0).reshape(3, 4),
           "rounds": jnp.array([0, 3, 2])}  # fmt: skip
    table = np.random.default_rng(0).uniform(size=(10, 4)).astype(np.float32)
    scores_of = lambda images: jnp.array(table)[images[:, 0, 0, 0] // 10]  # noqa: E731
    own = {"threshold": jax.tree.map(lambda leaf: leaf[jnp.array([2, 0])], old)}
    examples = Examples.of(data, Cohort(jnp.array([2, 0]), own, jax.random.key(0)))
    made = label_cohort(problem, scores_of, data, examples, threshold=0.5)
    for job, (client, rows) in enumerate(((2, [9, 1, 4]), (0, [8, 2]))):
        keep = momentum if old["rounds"][client] else 0.0
        level = keep * old["level"][client] + (1 - keep) * table[rows].max(axis=1).mean()
        by_class = keep * old["by_class"][client] + (1 - keep) * table[rows].mean(axis=0)
        found = jax.tree.map(lambda leaf, job=job: leaf[job], made.own["threshold"])
        np.testing.assert_allclose(found["level"], level, rtol=1e-5)
        np.testing.assert_allclose(found["by_class"], by_class, rtol=1e-5)
        assert found["rounds"] == old["rounds"][client] + 1
        thresholds = level * by_class / by_class.max()
        np.testing.assert_allclose(made.thresholds[job], thresholds, rtol=1e-5)
        labels = table[rows].argmax(axis=1)
        np.testing.assert_array_equal(made.report.labels[job, : len(rows)], labels)
        expected = table[rows].max(axis=1) >= thresholds[labels]
        np.testing.assert_array_equal(made.report.qualified[job], [*expected] + [False] * (3 - len(rows)))
