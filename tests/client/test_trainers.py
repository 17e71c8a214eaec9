"""The local trainers, batch after batch, against NumPy: weights, states, FreeMatch's fairness."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import UserError, base_config
from fedjax_ssl.client.acr import distance
from fedjax_ssl.client.confidence import Averages, fairness
from fedjax_ssl.client.deck import Batch
from fedjax_ssl.engine.interface import Problem
from fedjax_ssl.models import Outputs
from fedjax_ssl.run.validation import validate
from tests.helpers.linear_network import softmax
from tests.helpers.trainers import Seen, make_trainer
from tests.helpers.trainers_by_hand import FixMatch, FlexMatch, FreeMatch, SoftMatch, fairness_by_hand

CLASSES, N_MAX, SIZE, ROOM = 3, 12, 9, 4
# Of a client of nine images, in three batches of two passes: a short batch, an empty one, one image alone.
BATCHES = [(0, 1, 2, 3), (4, 5, 6), (), (7, 8), (3, 0, 8, 5), (1,), (2, 4, 6, 7)]
MOMENTUM, TAU = 0.8, 0.7


def trainer_of(kind, **fields):
    config = base_config()
    config.confidence.update({"kind": kind, "threshold": TAU, "momentum": MOMENTUM, **fields})
    return make_trainer(Problem(config, None, None, None, CLASSES))


def batch_of(positions):
    padded = np.array([*positions, *[SIZE + 1] * (ROOM - len(positions))], np.int32)  # the padding is of no image
    return Batch(padded, padded, np.arange(ROOM) < len(positions), np.int32(0))


def logits_of(seed=0, scale=3.0):
    """[N_MAX, C]: most images are of class 0, and some are unsure."""
    rng = np.random.default_rng(seed)
    return (scale * rng.normal(size=(N_MAX, CLASSES)) + [1.0, 0.0, -0.5]).astype(np.float32)


def over_batches(trainer, logits):
    """The targets of each batch, [(present weights, present labels) of each output], and the last state."""
    step = jax.jit(trainer.targets)
    state, found = trainer.init(N_MAX), []
    for positions in BATCHES:
        batch = batch_of(positions)
        of_batch = np.asarray(logits)[np.asarray(batch.positions)]
        targets, state = step(state, Seen(Outputs(of_batch, {}, ()), batch, jnp.int32(SIZE)))
        n = len(positions)
        assert all(np.all(np.asarray(target.weights)[n:] == 0) for target in targets)
        found.append([(np.asarray(target.weights)[:n], np.asarray(target.labels)[:n]) for target in targets])
    return found, state


RULES = {
    "fixed": ({}, lambda: FixMatch(TAU)),
    "flexmatch": ({}, lambda: FlexMatch(TAU, SIZE, CLASSES)),
    "flexmatch, no warm-up": ({"warm_up": False}, lambda: FlexMatch(TAU, SIZE, CLASSES, warm_up=False)),
    "freematch": ({}, lambda: FreeMatch(CLASSES, MOMENTUM)),
    "freematch, clamp": (
        {"clamp_least": 0.6, "clamp_most": 0.7},
        lambda: FreeMatch(CLASSES, MOMENTUM, clamp=(0.6, 0.7)),
    ),
    "softmatch": ({}, lambda: SoftMatch(CLASSES, MOMENTUM)),
}


@pytest.mark.parametrize("name", RULES)
def test_weights_are_those_of_numpy_in_every_batch(name):
    fields, make = RULES[name]
    rule, logits = make(), logits_of()
    trainer = trainer_of(name.partition(",")[0], **fields)
    found, _ = over_batches(trainer, logits)
    p, all_weights = softmax(logits.astype(np.float64)), []
    for positions, [(weights, labels)] in zip(BATCHES, found):
        of_batch = p[list(positions)]
        np.testing.assert_allclose(weights, rule.weigh(of_batch, positions), atol=1e-5)
        np.testing.assert_array_equal(labels, logits[list(positions)].argmax(axis=1))
        all_weights += list(weights)
    assert 0 <= min(all_weights) < max(all_weights) <= 1  # something counts, and something counts less


def test_bounds_of_freematch_that_exclude_each_other_are_refused():
    config = base_config()
    config.confidence.clamp_least, config.confidence.clamp_most = 0.9, 0.5
    with pytest.raises(UserError, match=r"confidence.clamp_least is 0.9, above confidence.clamp_most, 0.5"):
        validate(config)


def test_a_later_label_replaces_a_stored_one():
    trainer = trainer_of("flexmatch")
    state = jnp.full(N_MAX, -1).at[3].set(2)
    logits = jnp.array([[0.0, 9.0, 0.0], [0.1, 0.0, 0.0], [0.0, 0.0, 9.0], [0.0, 0.0, 0.0]])
    _, state = jax.jit(trainer.targets)(state, Seen(Outputs(logits, {}, ()), batch_of([3, 4]), jnp.int32(SIZE)))
    assert state[3] == 1 and state[4] == -1


def test_softmatch_without_memory_of_equal_scores():
    """No variance, and no image below the mean: all count."""
    trainer = trainer_of("softmatch", momentum=0.0)
    logits = np.tile(np.array([2.0, 0.0, 0.0], np.float32), (N_MAX, 1))
    for [(weights, _)] in over_batches(trainer, logits)[0]:
        np.testing.assert_allclose(weights, np.ones(len(weights)), atol=1e-5)


def test_fairness_and_its_gradient():
    state = Averages(jnp.float32(0.5), jnp.array([0.5, 0.3, 0.2]), jnp.array([0.6, 0.4, 0.0]))
    logits = logits_of(1, scale=1.0)[:6].astype(np.float64)
    weights = np.array([1.0, 0, 1, 1, 0, 1])
    value_and_gradient = jax.jit(jax.value_and_grad(lambda z, w: fairness(state, z, w)))
    value, gradient = value_and_gradient(jnp.float32(logits), jnp.float32(weights))
    of = functools.partial(fairness_by_hand, np.array([0.5, 0.3, 0.2]), np.array([0.6, 0.4, 0.0]))
    np.testing.assert_allclose(value, of(logits[weights > 0]), rtol=1e-5)
    expected = np.zeros_like(logits)
    for place in np.ndindex(*logits.shape):
        moved = [logits.copy(), logits.copy()]
        moved[0][place] -= 1e-5
        moved[1][place] += 1e-5
        low, high = (of(each[weights > 0]) for each in moved)
        expected[place] = (high - low) / 2e-5
    np.testing.assert_allclose(gradient, expected, atol=1e-4)
    nothing, gradient = value_and_gradient(jnp.float32(logits), jnp.zeros(6))
    assert nothing == 0 and np.all(np.asarray(gradient) == 0)


def test_freematch_takes_the_term_by_its_weight():
    trainer, logits = trainer_of("freematch", fairness_weight=0.3), jnp.asarray(logits_of()[:ROOM])
    state = Averages(jnp.float32(0.5), jnp.array([0.5, 0.3, 0.2]), jnp.array([0.6, 0.2, 0.2]))
    weights = jnp.array([1.0, 1.0, 0.0, 1.0])
    expected = 0.3 * fairness_by_hand([0.5, 0.3, 0.2], [0.6, 0.2, 0.2], logits_of()[[0, 1, 3]].astype(np.float64))
    found = jax.jit(trainer.further)(state, logits, weights)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert trainer_of("freematch", fairness_weight=0.0).further is None


def test_acr_s_distance_of_shares_without_a_class_is_finite():
    assert np.isfinite(jax.jit(distance)(np.float32([1, 0, 0]), np.float32([0, 0.5, 0.5])))
