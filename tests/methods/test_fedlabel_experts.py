"""Which of two experts labels, and what the other one says, against NumPy; and the batches of a client."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.client import Examples
from fedjax_ssl.engine.interface import Cohort
from fedjax_ssl.methods.fedlabel.client import choose, drawn_deck
from tests.helpers.experts_by_hand import choose_by_hand
from tests.helpers.linear_network import softmax
from tests.helpers.small_problem import CLASSES
from tests.helpers.toy_federation import federation

CLIENTS = [[8, 2, 6, 9, 1], [], [7, 3]]
DATA = federation(CLIENTS, {2: 1, 1: 0, 5: 1})


@pytest.mark.parametrize(("confidence", "experts"), [("entropy", "both"), ("variance", "local"), ("entropy", "global")])
def test_the_surer_expert_labels(confidence, experts):
    rng = np.random.default_rng(0)
    of_global, of_local = 2 * rng.normal(size=(2, 3, 8, CLASSES)).astype(np.float32)
    found = jax.device_get(jax.jit(choose, static_argnums=(2, 3))(of_global, of_local, confidence, experts))
    flat = [softmax(logits.astype(np.float64)).reshape(-1, CLASSES) for logits in (of_global, of_local)]
    labels, probability, other, ratio = choose_by_hand(*flat, confidence, experts)
    np.testing.assert_array_equal(found.labels.reshape(-1), labels)
    np.testing.assert_allclose(found.probability.reshape(-1), probability, rtol=1e-5)
    np.testing.assert_allclose(np.exp(found.other).reshape(-1, CLASSES), other, rtol=1e-4)
    np.testing.assert_allclose(found.ratio.reshape(-1), ratio, rtol=1e-4)
    agrees = flat[0].argmax(axis=1) == flat[1].argmax(axis=1)
    np.testing.assert_array_equal(found.agrees.reshape(-1), agrees if experts == "both" else False)
    of_one = labels != flat[0].argmax(axis=1)
    assert experts != "both" or (0 < of_one.sum() < 24 and np.all(np.asarray(found.ratio) <= 1))


def test_in_a_tie_the_global_expert_labels():
    """Of two equal experts lambda is lambda_0, even where both are sure of nothing."""
    logits = np.float32([[2.0, -1.0, 0.5], [0.0, 0.0, 0.0]])
    choice = jax.device_get(jax.jit(choose, static_argnums=2)(logits, logits, "variance"))
    assert np.all(choice.ratio == 1) and np.all(choice.labels == np.argmax(logits, axis=1))
    certain = np.float32([[200, 0, 0], [0, 200, 0]])
    choice = jax.device_get(jax.jit(choose, static_argnums=2)(certain, certain[::-1], "variance"))
    assert choice.labels.tolist() == [0, 1] and not choice.agrees.any()
    by_entropy = jax.device_get(jax.jit(choose, static_argnums=2)(certain, certain[::-1], "entropy"))
    np.testing.assert_allclose(by_entropy.ratio, 1)  # log(0) is not reached


def test_drawn_batches_are_subsets_without_repetition_each_drawn_anew():
    """Each step has its own batch of so many; a deck with fewer examples gives all of them in each step."""
    steps, size = 40, 3
    examples = Examples.of(DATA, Cohort(jnp.array([2, 0, 1]), {}, jax.random.key(4)))
    decks = drawn_deck(examples, examples.present, steps, size)
    np.testing.assert_array_equal(decks.num_steps(size), [steps, steps, 0])
    assert not np.any(jax.tree.map(lambda leaf: leaf[2], decks).batch(jnp.int32(1), size).mask)
    for job, client in ((0, 2), (1, 0)):
        deck = jax.tree.map(lambda leaf, job=job: np.asarray(leaf[job]), decks)
        rows, width = deck.rows[deck.order][:, : deck.size], min(size, len(CLIENTS[client]))
        assert rows.shape == (steps, width) and all(len(set(batch)) == width for batch in rows)
        labels, counts = np.unique(rows, return_counts=True)
        assert set(labels) == set(CLIENTS[client])
        if width == size:  # 40 draws of each example at 3/5: 24 +- 3.1, so these bounds are four deviations away
            assert all(11 < count < 37 for count in counts)
