"""Labelled and unlabelled batches in one step, wherever labels are: against NumPy, one client at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.engine.evaluation import score_pseudo_labels
from fedjax_ssl.methods import METHODS
from tests.helpers.consistency_by_hand import assert_as_by_hand, hard_labels, train_by_hand
from tests.helpers.small_problem import (
    federation,
    phases_of,
    pixels_of,
    predicted,
    prepare,
    sent_down,
    small_problem,
    train,
)

THRESHOLD = 0.6  # confident: some images and not others
EVAL = {"fixmatch.label_mode": "eval"}
ONLY_LABELS, NO_LABELS, A_FEW, NOBODY = range(4)


@pytest.fixture(scope="module")
def data():
    return federation([[0, 1, 2, 0, 1], [-1] * 7, [0, -1, -1, 2, 1, -1, 0, -1, -1], []])


def fixmatch(labels, **fields):
    """(problem, phase) of FixMatch with labels at the server, at clients or at some."""
    fields = {"confidence.threshold": THRESHOLD, "consistency.unlabelled_weight": 0.6, "data.labels": labels, **fields}
    problem = small_problem("fixmatch", **fields)
    return problem, phases_of(METHODS["fixmatch"].factory(problem))[0]


RECEIVED = {"confidence.labels_from": "received"}
MORE = {"consistency.unlabelled_ratio": 2}


@pytest.mark.parametrize("labels, client, fields, together", [
    ("server", NO_LABELS, EVAL, False),
    ("server", NO_LABELS, {**RECEIVED, **MORE}, False),
    ("clients", A_FEW, {}, True),
    ("some_clients", ONLY_LABELS, {}, True),
])  # fmt: skip
def test_local_training_is_that_of_the_equations(data, labels, client, fields, together):
    """L = H(y, f(a(x))) + lambda_u L_u for a client with a few labels, with none, with labels only.

    Labels are made in training or evaluation mode.
    """
    problem, phase = fixmatch(labels, **fields)
    received, mode = sent_down(problem), problem.config.fixmatch.label_mode
    job, finished = train(phase, received, data, client)
    assert_as_by_hand(
        finished, train_by_hand(problem, data, received, job.work, hard_labels(THRESHOLD), mode, together)
    )
    assert client == ONLY_LABELS or 0 < finished.metrics["confident_share"] < 1


def test_flexmatch_s_thresholds_are_of_all_the_client_s_images(data):
    """Once a round from the received model's labels; most images are unsure, and no step's batch is as large."""
    threshold = 0.59
    problem, phase = fixmatch("server", **{"confidence.kind": "flexmatch", "confidence.threshold": threshold})
    received, rows = sent_down(problem), np.asarray(data.client_index[NO_LABELS])[:7]
    p = predicted(received.model, pixels_of(data, rows))
    counts = np.bincount(p.argmax(axis=1)[p.max(axis=1) >= threshold], minlength=3)
    assert 7 - counts.sum() > counts.max() > 0
    beta = counts / (7 - counts.sum())
    needed = threshold * beta / (2 - beta)
    job, finished = train(phase, received, data, NO_LABELS)
    rule = lambda p: (np.eye(3)[p.argmax(axis=1)], p.max(axis=1) >= needed[p.argmax(axis=1)])  # noqa: E731
    assert_as_by_hand(finished, train_by_hand(problem, data, received, job.work, rule))


@pytest.mark.parametrize("ratio, steps", [(1, [2, 3, 2, 0]), (2, [2, 2, 2, 0])])
def test_an_epoch_goes_through_both_decks_and_round_the_shorter_one_again(data, ratio, steps):
    """Unlabelled images in batches of 3 or 6; labelled ones, 4 and 5, always in batches of 3."""
    problem, phase = fixmatch("clients", **{"consistency.unlabelled_ratio": ratio})
    received = sent_down(problem)
    assert [int(prepare(phase, received, data, client).num_steps) for client in range(4)] == [2 * n for n in steps]


def test_orders_of_both_decks_are_drawn_apart(data):
    """Two decks of the same images have different ones."""
    problem, phase = fixmatch("clients", **{"consistency.include_labelled": True})
    decks = prepare(phase, sent_down(problem), data, ONLY_LABELS).work.decks
    assert decks["unlabelled"].size == decks["labelled"].size == 5
    assert np.any(decks["unlabelled"].order != decks["labelled"].order)


def test_labels_at_the_server_leave_no_labelled_part(data):
    for labels, views in ("server", [3, 3]), ("clients", [9]):
        problem = small_problem("fixmatch", **{"data.labels": labels})
        phase, received = phases_of(METHODS["fixmatch"].factory(problem))[0], sent_down(problem)
        job = jax.eval_shape(lambda phase=phase, received=received: prepare(phase, received, data, NO_LABELS))
        carry = jax.eval_shape(phase.start, received, data, job.work, {})
        jax.eval_shape(phase.step, received, data, job.work, carry, jnp.int32(0), jax.random.key(0))
        # The weak and the strong view alone; or with labelled images. `start` and `step` share a trace.
        assert problem.network.passes == [views]
        assert ("labelled" not in job.work.decks) == (labels == "server")
        assert ("labelled_loss" in carry.totals) == (labels == "clients")


def test_a_revealed_label_joins_the_loss(data):
    """The server has labels, and the clients' are revealed: the labelled part is there."""
    problem, phase = fixmatch("server", **{"data.reveal_labels": True})
    received = sent_down(problem)
    job, finished = train(phase, received, data, A_FEW)
    by_hand = train_by_hand(problem, data, received, job.work, hard_labels(THRESHOLD), together=True)
    assert_as_by_hand(finished, by_hand)
    assert finished.metrics["labelled_loss"] > 0


def test_the_report_scores_the_unlabelled_images_and_counts_the_labelled_as_trained_on(data):
    problem, phase = fixmatch("clients", **{"confidence.kind": "share", "confidence.share": 0.4})
    received, size = sent_down(problem), 9
    job = prepare(phase, received, data, A_FEW)
    rows = np.asarray(data.client_index[A_FEW])[:size]
    p = predicted(received.model, pixels_of(data, rows))
    known = np.asarray(data.visible_labels)[rows] >= 0
    ranked = np.sort(p.max(axis=1)[~known])[::-1]  # of the unlabelled images alone
    level = (ranked[1] + ranked[2]) / 2  # two of five
    np.testing.assert_allclose(job.work.labels.state, level, rtol=1e-5)
    report = jax.tree.map(lambda leaf: np.asarray(leaf)[:size], job.work.labels.report)
    np.testing.assert_array_equal(report.labels, p.argmax(axis=1))
    np.testing.assert_array_equal(report.qualified, known | (p.max(axis=1) >= level))
    assert 0 < np.sum(~report.qualified) < size and not job.work.labels.report.qualified[size]

    truth = np.where(known, p.argmax(axis=1) + 1, p.argmax(axis=1)) % 3  # labelled images would be wrong
    one_row = jax.tree.map(lambda leaf: leaf[None], report)
    scored = score_pseudo_labels(one_row, truth[None], ~known[None], 1)
    assert scored["pseudo_label_accuracy"] == scored["qualified_accuracy"] == 1
    assert scored["qualified_per_client"] == np.sum((p.max(axis=1) >= level) & ~known)
