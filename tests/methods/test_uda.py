"""UDA: the sharpened target and which images count, against NumPy."""

import pytest

from fedjax_ssl import UserError
from fedjax_ssl.methods import METHODS
from fedjax_ssl.run.validation import validate
from tests.helpers.consistency_by_hand import assert_as_by_hand, train_by_hand
from tests.helpers.small_problem import federation, phases_of, sent_down, small_problem, train


def sharpened(temperature, threshold):
    """UDA's rule: p to p^(1/T) over their sum, where the largest p itself is not below the threshold."""

    def rule(p):
        powers = p ** (1 / temperature)
        return powers / powers.sum(axis=1, keepdims=True), p.max(axis=1) >= threshold

    return rule


@pytest.mark.parametrize(
    "labels, client, together, labels_from",
    [("server", 0, False, "local"), ("clients", 1, True, "local"), ("server", 0, False, "received")],
)
def test_local_training_is_that_of_the_equations(labels, client, together, labels_from):
    data = federation([[-1] * 7, [0, -1, -1, 2, 1, -1, 0, -1, -1]])
    fields = {"confidence.threshold": 0.6, "uda.temperature": 0.7, "data.labels": labels}
    problem = small_problem("uda", **fields, **{"confidence.labels_from": labels_from})
    received = sent_down(problem)
    job, finished = train(phases_of(METHODS["uda"].factory(problem))[0], received, data, client)
    rule = sharpened(temperature=0.7, threshold=0.6)
    by_hand = train_by_hand(problem, data, received, job.work, rule, together=together)
    assert_as_by_hand(finished, by_hand)
    assert any(0 < count < 3 for count in by_hand[3])


def test_a_temperature_of_nothing_is_refused():
    with pytest.raises(UserError, match=r"uda.temperature must be above 0, not 0.0"):
        validate(small_problem("uda", **{"uda.temperature": 0.0}).config)
