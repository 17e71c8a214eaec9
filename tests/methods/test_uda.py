"""UDA: the sharpened target, which images count, and the divergence, against NumPy."""

import numpy as np
import pytest

from fedjax_ssl import UserError
from fedjax_ssl.config import validate
from fedjax_ssl.learning.losses import soft_label_loss
from fedjax_ssl.methods import METHODS
from tests.helpers.consistency_by_hand import assert_as_by_hand, train_by_hand
from tests.helpers.small_problem import federation, sent_down, small_problem, train


def sharpened(temperature, threshold):
    """UDA's rule: p to p^(1/T) over their sum, where the largest p itself is not below the threshold."""

    def rule(p):
        powers = p ** (1 / temperature)
        return powers / powers.sum(axis=1, keepdims=True), p.max(axis=1) >= threshold

    return rule


def test_the_divergence_is_weighted_and_taken_over_the_whole_batch():
    """1/B sum_b w_b KL(q_b || p_b), with a target that is 0 somewhere, image by image."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 3)).astype(np.float32)
    targets = np.array([[0.2, 0.5, 0.3], [1, 0, 0], [0.6, 0.4, 0], [0.1, 0.1, 0.8]], np.float32)
    weights, mask = np.array([1, 0.5, 0, 1], np.float32), np.array([True, True, True, False])
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    divergences = [sum(q * np.log(q / r) for q, r in zip(*pair) if q > 0) for pair in zip(targets, p)]
    expected = (divergences[0] + 0.5 * divergences[1]) / 3
    np.testing.assert_allclose(soft_label_loss(logits, targets, weights, mask), expected, rtol=1e-5)
    assert soft_label_loss(np.log(targets + 1e-30), targets, weights, mask) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("labels, client, together", [("server", 0, False), ("clients", 1, True)])
def test_local_training_is_that_of_the_equations(labels, client, together):
    data = federation([[-1] * 7, [0, -1, -1, 2, 1, -1, 0, -1, -1]])
    fields = {"uda.threshold": 0.6, "uda.temperature": 0.7, "data.labels": labels}
    problem = small_problem("uda", **fields)
    received = sent_down(problem)
    job, finished = train(METHODS["uda"].factory(problem).phases[0], received, data, client)
    rule = sharpened(temperature=0.7, threshold=0.6)
    by_hand = train_by_hand(problem, data, received, job.work, rule, together=together)
    assert_as_by_hand(finished, by_hand)
    assert any(0 < count < 3 for count in by_hand[3])


def test_a_temperature_of_nothing_is_refused():
    with pytest.raises(UserError, match=r"uda.temperature must be above 0, not 0.0"):
        validate(small_problem("uda", **{"uda.temperature": 0.0}).config)
