"""What several models say of the same images: the vote, and divergence from one's own."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.methods.fedmatch.client import agreed_labels, inter_client_consistency
from tests.helpers.small_problem import CLASSES

KEY = jax.random.key(0)


def logits_of(labels, top=3.0):
    return top * jnp.eye(CLASSES)[jnp.array(labels)]


def test_the_label_is_the_vote_s():
    guess = jnp.array([0, 2, 1, 2])
    helpers = jnp.stack([logits_of([1, 2, 0, 1]), logits_of([1, 0, 2, 0])])
    both, first, nobody = (jnp.array(present) for present in ([True, True], [True, False], [False, False]))
    np.testing.assert_array_equal(agreed_labels(guess, helpers, both), [1, 2, 0, 0])  # ties: the first class
    np.testing.assert_array_equal(agreed_labels(guess, helpers, first), [0, 2, 0, 1])
    np.testing.assert_array_equal(agreed_labels(guess, helpers, nobody), guess)
    np.testing.assert_array_equal(agreed_labels(guess, helpers[:0], both[:0]), guess)


def test_helpers_that_agree_cost_nothing():
    logits = jax.random.normal(KEY, (4, CLASSES))
    confident, present = jnp.array([True, False, True, True]), jnp.array([True, True])
    other = logits.at[1].add(jnp.arange(CLASSES))  # another opinion where nobody is confident
    helpers = jnp.stack([logits, other])
    np.testing.assert_allclose(inter_client_consistency(helpers, present, logits, confident), 0, atol=1e-6)
    assert inter_client_consistency(helpers, present, logits, ~confident) > 0.01
    assert inter_client_consistency(helpers, ~present, logits, ~confident) == 0
