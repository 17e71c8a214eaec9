"""FedPDM: its matching, against plain scaling of a matrix, and a client's steps."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data.federated import Attackers
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.fedpdm import match
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

RNG = np.random.default_rng(0)
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


def test_matching_is_optimal_transport():
    p = RNG.dirichlet([4, 1, 1], 30).astype(np.float32)  # the model prefers a class that is rare
    mask = np.arange(30) < 24
    matched, shares = jax.jit(match), SHARES.astype(np.float32)
    found = np.asarray(matched(p, mask, shares))
    expected = scaled(np.float64(p[mask]), SHARES, 10.0)
    np.testing.assert_allclose(found[mask], expected, atol=0.03)  # it ends when columns miss by 1 %
    assert np.abs(expected - p[mask]).max() > 0.5  # which is far from what the model said
    garbage = np.where(mask[:, None], p, 7.0).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(matched(garbage, mask, shares))[mask], found[mask])


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
