"""Rules for confidence against NumPy written from their papers' equations, over all images of a client at once.

Batch by batch they are in test_trainers.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import UserError, base_config
from fedjax_ssl.client import Confidence, Examples, make_confidence, own_confidence
from fedjax_ssl.client.confidence import KINDS, MEMORY, Averages, once_a_round, states_at_start
from fedjax_ssl.engine.interface import Problem
from tests.helpers.toy_federation import federation

CLASSES, NUMBER = 5, 23  # images of the client, of 30 rows


@pytest.fixture(scope="module")
def client():
    """Probabilities of 30 examples over 5 classes, class 3 rare, the last 7 rows padding."""
    rng = np.random.default_rng(0)
    logits = 3 * rng.normal(size=(30, CLASSES)) - np.array([0, 0, 0, 4, 0])
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return scores.astype(np.float32), np.arange(30) < NUMBER


def problem_of(kind, **fields):
    config = base_config()
    config.num_clients = 3
    config.confidence.update({"kind": kind, "momentum": 0.75, **fields})
    return Problem(config, None, None, None, CLASSES)


def examples_of(present, own, rounds=None):
    """The examples of a cohort as a rule sees them."""
    return Examples(present, present, present, None, own, rounds)


def weights_of(problem, scores, present, tau=0.9, own=None, strictly=False):
    """The weights of one client's images, and its memory afterwards."""
    rule = make_confidence(problem, tau, strictly)
    own = {} if own is None else {MEMORY: jax.tree.map(lambda leaf: np.asarray(leaf)[None], own)}
    label = jax.jit(lambda scores, *client: once_a_round(problem, rule, scores, examples_of(*client)))
    _, weights, memory = label(scores[None], present[None], own)
    assert np.all(np.asarray(weights)[0, ~np.asarray(present)] == 0)
    return np.asarray(weights)[0, :NUMBER], jax.tree.map(lambda leaf: np.asarray(leaf)[0], memory.get(MEMORY))


def reached(scores, thresholds):
    """1 for each image whose largest score reaches the threshold of its class."""
    return np.array([float(row.max() >= thresholds[row.argmax()]) for row in scores[:NUMBER]])


def test_fixed(client):
    scores, present = client
    weights, memory = weights_of(problem_of("fixed"), scores, present)
    np.testing.assert_array_equal(weights, reached(scores, [0.9] * CLASSES))
    assert memory is None and 0 < weights.sum() < NUMBER


@pytest.mark.parametrize(("share", "count"), [(0.01, 0), (0.5, 12), (0.99, 23)])
def test_a_share_of_the_examples(client, share, count):
    """So many of the largest scores, to the nearest whole number of 23; the same whether 'above' or 'at' is asked."""
    scores, present = client
    best = scores[:NUMBER].max(axis=1)
    for strictly in (False, True):
        counted = weights_of(problem_of("share", share=share), scores, present, strictly=strictly)[0] > 0
        assert counted.sum() == count
        assert count in (0, NUMBER) or best[counted].min() > best[~counted].max()


@pytest.mark.parametrize("strictly", [False, True])
def test_of_equal_scores_at_the_boundary_all_count(strictly):
    """A model that is sure of many images gives them the same probability, 1."""
    scores = np.tile(np.eye(CLASSES, dtype=np.float32)[0], (NUMBER, 1))
    scores[NUMBER // 2 :] *= 0.6
    counted = weights_of(problem_of("share", share=0.2), scores, np.ones(NUMBER, bool), strictly=strictly)[0] > 0
    np.testing.assert_array_equal(counted, np.arange(NUMBER) < NUMBER // 2)


def test_self_adaptive(client):
    scores, present = client
    level, by_class = scores[:NUMBER].max(axis=1).mean(), scores[:NUMBER].mean(axis=0)
    weights, memory = weights_of(problem_of("sat"), scores, present)
    np.testing.assert_array_equal(weights, reached(scores, level * by_class / by_class.max()))
    assert memory is None and make_confidence(problem_of("sat"), 0.9).regulariser is None
    # Negative cosines are no share, and a class without anchors (-inf) has the threshold 0.
    cosines = 2 * scores - 1
    cosines[:, 2] = -np.inf
    by_class = np.maximum(cosines[:NUMBER], 0).mean(axis=0)
    thresholds = cosines[:NUMBER].max(axis=1).mean() * by_class / by_class.max()
    assert thresholds[2] == 0
    np.testing.assert_array_equal(weights_of(problem_of("sat"), cosines, present)[0], reached(cosines, thresholds))


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_without_examples_has_finite_weights(kind):
    scores, nobody = np.full((4, CLASSES), 0.2, np.float32), np.zeros(4, bool)
    problem = problem_of(kind, momentum=0.0)
    rule = make_confidence(problem, 0.5)

    @jax.jit
    def label(scores, present):
        states, weights, _ = once_a_round(problem, rule, scores[None], examples_of(present[None], {}))
        return weights, rule.weigh(jax.tree.map(lambda leaf: leaf[0], states), scores, jnp.int32(0))

    weights, unmasked = label(scores, nobody)
    assert np.all(np.asarray(weights) == 0) and np.all(np.isfinite(unmasked))


def test_what_a_method_cannot_use_is_refused(client):
    scores, present = client
    with pytest.raises(UserError, match=r"confidence.kind='softmatch' gives weights, but fedanchor has none"):
        make_confidence(problem_of("softmatch"), 0.9, hard=True)
    for kind in ("freematch", "softmatch"):
        with pytest.raises(UserError, match=rf"'{kind}' averages over updates.*set confidence.memory='run'"):
            weights_of(problem_of(kind), scores, present)


@pytest.mark.parametrize("memory", ["round", "run"])
def test_a_rule_gets_the_round(memory):
    """At its beginning, for labels once a round and for steps; a state that lasts for the run goes on from its last."""
    rule = Confidence(
        init=lambda n_max: jnp.float32(0.0),
        update=lambda state, scores, present, positions: state,
        weigh=lambda state, scores, size: (jnp.max(scores, axis=-1) > state).astype(scores.dtype),
        begin=lambda state, number: state + number / 10,
    )
    problem, scores = problem_of("fixed", memory=memory), jnp.array([[[0.3, 0.7], [0.45, 0.55]]])
    own, present = {MEMORY: jnp.full(1, 0.4)}, jnp.ones((1, 2), bool)
    examples = examples_of(present, own, jnp.array([2]))
    state, weights, after = once_a_round(problem, rule, scores, examples)
    assert state == pytest.approx(0.2 if memory == "round" else 0.6)
    np.testing.assert_array_equal(weights, [[1, memory == "round"]])
    assert after == ({} if memory == "round" else {MEMORY: state})
    assert states_at_start(problem, rule, examples) == state


def test_a_rule_of_one_s_own_begins_with_the_method_s_threshold():
    def falling(options, num_classes, threshold, strictly):
        return Confidence(lambda n_max: jnp.float32(threshold), None, None)

    problem = problem_of("fixed", memory="run")._replace(own_rule=falling)
    memory = own_confidence(problem, federation(), make_confidence(problem, 0.9))
    np.testing.assert_array_equal(memory[MEMORY], np.full(5, 0.9, np.float32))


def test_the_averages_are_the_client_s_memory():
    """Labelling reads each client's row of the memory, and gives its new averages back."""
    problem = problem_of("freematch", memory="run")
    data, rule, rng = federation([[8, 2], [5], [9, 1, 4]]), make_confidence(problem, 0.9), np.random.default_rng(0)
    memory = own_confidence(problem, data, rule)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(memory)} == {3}
    assert own_confidence(problem_of("freematch"), data, rule) == {}
    old = Averages(*(jnp.asarray(rng.uniform(0.1, 0.9, leaf.shape), jnp.float32) for leaf in memory[MEMORY]))
    chosen, scores = np.array([2, 0]), rng.uniform(size=(2, 3, CLASSES)).astype(np.float32)
    own, present = {MEMORY: jax.tree.map(lambda leaf: leaf[chosen], old)}, np.array([[True] * 3, [True, True, False]])
    label = jax.jit(lambda scores, present: once_a_round(problem, rule, scores, examples_of(present, own)))
    _, weights, after = label(scores, present)
    for row, client in enumerate(chosen):
        p = scores[row, present[row]]
        level = 0.75 * old.level[client] + 0.25 * p.max(axis=1).mean()
        by_class = 0.75 * np.asarray(old.by_class[client]) + 0.25 * p.mean(axis=0)
        np.testing.assert_allclose(after[MEMORY].level[row], level, rtol=1e-5)
        np.testing.assert_allclose(after[MEMORY].by_class[row], by_class, rtol=1e-5)
        counts = [of_image.max() >= level * by_class[of_image.argmax()] / by_class.max() for of_image in p]
        np.testing.assert_array_equal(weights[row], [*counts, *[0] * (3 - len(p))])
