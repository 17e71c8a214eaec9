"""UDA: the sharpened target and which images count, against NumPy."""

from fedjax_ssl.methods import METHODS
from tests.helpers.consistency_by_hand import assert_as_by_hand, train_by_hand
from tests.helpers.small_problem import federation, phases_of, sent_down, small_problem, train


def sharpened(temperature, threshold):
    """UDA's rule: p to p^(1/T) over their sum, where the largest p itself is not below the threshold."""

    def rule(p):
        powers = p ** (1 / temperature)
        return powers / powers.sum(axis=1, keepdims=True), p.max(axis=1) >= threshold

    return rule


def test_local_training_with_labels_of_the_received_model():
    """The server has the labels; tests/official has labels at clients, and of the model in training."""
    data = federation([[-1] * 7])
    problem = small_problem("uda,gpl", **{"confidence.threshold": 0.6, "uda.temperature": 0.7})
    received = sent_down(problem)
    job, finished = train(phases_of(METHODS["uda"].factory(problem))[0], received, data, 0)
    rule = sharpened(temperature=0.7, threshold=0.6)
    by_hand = train_by_hand(problem, data, received, job.work, rule)
    assert_as_by_hand(finished, by_hand)
    assert any(0 < count < 3 for count in by_hand[3])
