"""CBAFed's thresholds, the views that are labelled once, and what the server keeps of each client, against NumPy.

tests/official/cbafed.py has whole rounds of both stages: steps, residual connections, weights.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.engine.interface import Received, Upload
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.cbafed import COUNTS, GIVEN, CBAFedExtra
from fedjax_ssl.methods.cbafed.client import Acceptance, accept, acceptance
from tests.helpers.linear_network import divided, in_numpy
from tests.helpers.small_problem import (
    CLASSES,
    NUM_CLIENTS,
    federation,
    handed_on,
    itself,
    loss_and_gradient,
    phases_of,
    pixels_of,
    predicted,
    prepare,
    sent_down,
    small_problem,
    train,
)

LABELLED, SEVEN = 0, 1
GIVEN_LABELS = [0, 2, 1, 1, 0]


@pytest.fixture(scope="module")
def data():
    return federation([GIVEN_LABELS, [-1] * 7, [-1] * 3, [-1] * 8])


def build(weak=itself, **fields):
    once = {"client.epochs": 1, "client.persistent": False, "client.unlabelled_learning_rate": 0.3}
    problem = small_problem("cbafed", weak=weak, **{**once, **fields})
    return problem, METHODS["cbafed"].factory(problem)


def extra(thresholds=(0.5, 0.5, 0.5), rare=(False, False, False), second_stage=True):
    return CBAFedExtra(Acceptance(jnp.array(thresholds), jnp.array(rare)), jnp.bool_(second_stage))


# --- Which labels count. ---------------------------------------------------------------------------------------------


def test_thresholds_follow_the_shares_of_the_classes():
    """T_c = min(P_c + 0.84 - std(P), cap), the deviation unbiased, P times C / 10; rare is below 0.03."""
    num_classes, cap = 100, 0.85
    counts = np.random.default_rng(num_classes).integers(0, 60, num_classes) ** 2
    counts[1] = 0
    thresholds, rare = acceptance(jnp.array(counts, jnp.float32), cap)
    p = counts / counts.sum() * num_classes / 10
    deviation = np.sqrt(np.sum((p - p.mean()) ** 2) / (num_classes - 1))
    np.testing.assert_allclose(thresholds, [min(x + 0.84 - deviation, cap) for x in p], rtol=1e-5)
    np.testing.assert_array_equal(rare, p < 0.03)
    assert rare[1] and not rare.all()


def test_the_second_class_may_not_count():
    """A probability must exceed its class's threshold; 0.5 does not. With `second_labels` a rare second class may."""
    p = jnp.array([[0.6, 0.3, 0.1], [0.5, 0.3, 0.2], [0.3, 0.5, 0.2]])
    by = Acceptance(jnp.array([0.5, 0.7, 0.65]), jnp.array([True, False, False]))
    np.testing.assert_array_equal(accept(p, by, True), ([0, 0, 0], [True, False, True]))
    np.testing.assert_array_equal(accept(p, by, False), ([0, 0, 1], [True, False, False]))


def coin(key, images):
    """A view that is mirrored or not."""
    return jnp.where(jax.random.bernoulli(key), images[:, :, ::-1], images)


@pytest.mark.test_all
def test_the_views_that_were_labelled_are_trained_on():
    """One view of each image, drawn once. The prior of `app_u` is that of the images without a label.

    The client has labels too, so this pass goes on from the model that it trained on them.
    """
    data = federation([GIVEN_LABELS, [-1, -1, 1, -1, -1, 1, -1]])
    problem, method = build(coin, **{"confidence.debias": "app_u", "client.batch_size": 7})
    received = sent_down(problem, extra(), seed=1)
    before = handed_on(*train(phases_of(method)[0], received, data, SEVEN))
    job, finished = train(phases_of(method)[1], received, data, SEVEN, previous=before)

    rows, keys = np.asarray(data.client_index)[SEVEN, :7], jax.random.wrap_key_data(job.work.labels.more)
    of_row = lambda key, row: pixels_of(data, [row], lambda _, images: coin(key, images))[0]  # noqa: E731
    keys = [jax.random.fold_in(jax.random.fold_in(keys, place), 0) for place in range(7)]
    pixels = np.stack([of_row(key, row) for key, row in zip(keys, rows)])
    unknown = np.asarray(data.visible_labels)[rows] < 0
    p = predicted(received.model, pixels)
    plain, p = p, divided(p, p[unknown].mean(axis=0))
    labels, accepted = p.argmax(axis=1), unknown & (p.max(axis=1) > 0.5)
    assert 1 < accepted.sum() < 5 and np.any(plain.argmax(axis=1) != labels)
    report = job.work.labels.report
    np.testing.assert_array_equal(report.qualified[:7], accepted)
    np.testing.assert_array_equal(report.labels[:7][accepted], labels[accepted])
    counts = np.bincount(labels[accepted], minlength=CLASSES)
    np.testing.assert_array_equal(finished.upload.metadata[COUNTS], counts)
    x, targets = pixels[accepted], np.eye(CLASSES)[labels[accepted]] / accepted.sum()
    trained = in_numpy(jax.tree.map(lambda leaf: leaf[0], before.upload.model.params))
    loss, _ = loss_and_gradient(trained, x, x.mean(axis=0), targets)
    assert job.num_steps == 1
    np.testing.assert_allclose(finished.metrics["unlabelled_loss"], loss, rtol=1e-5)


# --- The two stages. -------------------------------------------------------------------------------------------------


def test_in_the_first_stage_only_clients_with_labels_train(data):
    """For their own number of epochs, even if there are more than in the second one."""
    problem, method = build(**{"cbafed.labelled_epochs": 7, "client.epochs": 8})
    for second_stage, steps in ((False, 8 * 2), (True, 7 * 2)):
        received = sent_down(problem, extra((0.0, 0.0, 0.0), second_stage=second_stage))
        assert prepare(phases_of(method)[0], received, data, LABELLED).num_steps == steps
        nothing = handed_on(*train(phases_of(method)[0], received, data, SEVEN))
        job = prepare(phases_of(method)[1], received, data, SEVEN, previous=nothing)
        assert job.takes_part == np.any(job.work.labels.report.qualified) == (job.num_steps > 0) == second_stage


def test_the_server_remembers_each_client_s_last_labels(data):
    """An upload that is lost tells nothing, also beside a late one of the same client; an absent client's still count.

    An upload's weight is its number of labels, with a factor for given ones.
    """
    problem, method = build(**{"cbafed.warm_up_rounds": 1, "cbafed.labelled_factor": 2.0})
    state, rng = method.init(data, jax.random.key(0)), np.random.default_rng(1)
    given = np.bincount(GIVEN_LABELS, minlength=CLASSES)
    np.testing.assert_array_equal(state.server[GIVEN], given)
    remembered, aggregate = np.zeros((NUM_CLIENTS, CLASSES)), jax.jit(method.aggregate)
    rounds = [  # clients, accepted uploads, and who is absent
        ([2, 0, 1], [True, True, True], None),
        ([2, 0, 1], [False, True, True], 0),
        ([3, 0, 1], [True, True, False], None),
        ([1, 0, 1], [True, True, False], None),
    ]
    for number, (clients, accepted, absent) in enumerate(rounds):
        broadcast = method.broadcast(state, data, None)
        assert broadcast.extra.second_stage == (number > 0)
        by = acceptance(jnp.array(given + remembered.sum(axis=0)), problem.config.cbafed.cap)
        np.testing.assert_allclose(broadcast.extra.acceptance.thresholds, by.thresholds, rtol=1e-6)

        clients, accepted = np.array(clients), np.array(accepted)
        counts = rng.integers(1, 9, (3, CLASSES)) * (clients > 0)[:, None]
        sizes = np.array([50, 70, 30, 80])[clients] * (np.arange(3) != (3 if absent is None else absent))
        told = {"labelled": np.where(clients == 0, 5.0, 0.0), COUNTS: counts.astype(float)}
        uploads = jax.tree.map(lambda leaf: rng.normal(size=(3, *leaf.shape)), state.model)
        uploads = jax.tree.map(jnp.float32, Upload(uploads, told))
        received = Received(uploads, *map(jnp.asarray, (accepted, clients)), None, *[jnp.asarray(sizes)] * 2)
        state, _ = aggregate(state, data, received, jax.random.key(0))
        state = state._replace(round=state.round + 1)
        weights = accepted * (2.0 * told["labelled"] + counts.sum(axis=1))
        for found, leaf in zip(jax.tree.leaves(state.model), jax.tree.leaves(uploads.model)):
            np.testing.assert_allclose(found, np.tensordot(weights / weights.sum(), leaf, 1), atol=1e-5)
        here = sizes > 0
        remembered[clients[here]] = 0
        np.add.at(remembered, clients[here], np.where(accepted[:, None], counts, 0)[here])
        np.testing.assert_array_equal(state.server[COUNTS], remembered)
    assert remembered[1].sum() > 0 and remembered[2].sum() > 0
