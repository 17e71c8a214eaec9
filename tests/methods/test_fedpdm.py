"""FedPDM: which images count by a rule for the labels, against plain scaling of a matrix."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data.federated import Attackers
from fedjax_ssl.methods import METHODS
from tests.helpers.small_problem import (
    federation,
    mirrored,
    phases_of,
    pixels_of,
    predicted,
    prepare,
    sent_down,
    small_problem,
)

SHARES = np.array([0.1, 0.2, 0.7])


def scaled(p, shares, sharpness, iterations=2_000):
    """The conditional probabilities of the transport plan: rows and columns of the kernel scaled in turn."""
    number, num_classes = p.shape
    kernel = np.ones((number + 1, num_classes + 1))
    kernel[:-1, :-1] = (np.exp(p) / np.exp(p).sum(axis=1, keepdims=True)) ** sharpness
    rows, columns = np.append(np.ones(number), num_classes + 1), np.append(1 + number * shares, 1)
    a = np.ones(number + 1)
    for _ in range(iterations):
        b = columns / (kernel.T @ a)
        a = rows / (kernel @ b)
    plan = a[:, None] * kernel * b
    np.testing.assert_allclose(plan.sum(axis=0), columns, rtol=1e-6)
    return plan[:-1, :-1]


def test_a_rule_for_the_labels_counts_unlabelled_images_alone():
    """The half of them with the largest matched probabilities; labelled ones are qualified anyway."""
    data = federation([[0, -1, -1, 2, 1, -1, -1, -1, -1, 1]])
    fields = {"confidence.kind": "share", "confidence.share": 0.5}
    problem = small_problem("fedpdm", **fields)
    received, own = sent_down(problem), {"unlabelled_shares": jnp.asarray(SHARES, jnp.float32)}
    (phase,) = phases_of(METHODS["fedpdm"].factory(problem))

    def second_round(received, data, cohort, previous):  # the first one with matching
        return phase.prepare(received, data, cohort._replace(round=jnp.array([1])), previous)

    rows = np.asarray(data.client_index)[0, :10]
    unlabelled = np.asarray(data.visible_labels)[rows] < 0
    p = predicted(received.model, pixels_of(data, rows, mirrored))
    false = Attackers(None, jnp.ones(len(data.inputs), bool))
    liar = data._replace(attackers=false)  # takes each image for one of the next class
    lay_out = jax.jit(lambda data: prepare(phase._replace(prepare=second_round), received, data, 0, own))
    for shift, of_client in enumerate((data, liar)):
        report = lay_out(of_client).work.labels.report
        matched = scaled(np.roll(p[unlabelled], shift, axis=1), SHARES, 10.0)
        largest = matched.max(axis=1)
        np.testing.assert_array_equal(report.labels[unlabelled], matched.argmax(axis=1))
        np.testing.assert_array_equal(report.qualified[unlabelled], largest >= np.sort(largest)[3])
        assert np.all(report.qualified[~unlabelled])
