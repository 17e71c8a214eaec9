"""FedPDM: its matching, against plain scaling of a matrix, and a client's steps."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.data.federated import Attackers
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.fedpdm import match
from tests.helpers.consistency_by_hand import batches
from tests.helpers.linear_network import at_rest, in_numpy, sgd_step
from tests.helpers.small_problem import (
    CLASSES,
    assert_model,
    federation,
    loss_and_gradient,
    mirrored,
    negative,
    phases_of,
    pixels_of,
    prepare,
    probabilities,
    running_mean,
    sent_down,
    small_problem,
    statistics_of,
    train,
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


@pytest.mark.parametrize("sharpness", [3.0, 10.0])
def test_matching_is_optimal_transport(sharpness):
    p = RNG.dirichlet([4, 1, 1], 30).astype(np.float32)  # the model prefers a class that is rare
    mask = np.arange(30) < 24
    found = np.asarray(match(p, mask, SHARES.astype(np.float32), sharpness))
    expected = scaled(np.float64(p[mask]), SHARES, sharpness)
    np.testing.assert_allclose(found[mask], expected, atol=0.03)  # it ends when columns miss by 1 %
    assert np.abs(expected - p[mask]).max() > 0.5  # which is far from what the model said
    garbage = np.where(mask[:, None], p, 7.0).astype(np.float32)
    np.testing.assert_array_equal(
        np.asarray(match(garbage, mask, SHARES.astype(np.float32), sharpness))[mask], found[mask]
    )


def test_steps_are_those_of_the_equations():
    """In the first of four rounds: labels by matching, shares of before and then of now in both losses, an average."""
    data = federation([[0, -1, -1, 2, 1, -1, -1, -1, -1, 1]])
    options = {"shares_decay": 0.3, "adjustment": 0.8, "ema_decay": 0.6, "warm_up_rounds": 0}
    fields = {f"fedpdm.{name}": value for name, value in options.items()} | {"confidence.threshold": 0.75}
    problem = small_problem("fedpdm", num_rounds=4, **fields)
    received, config, before = sent_down(problem), problem.config.client, SHARES
    (phase,) = phases_of(METHODS["fedpdm"].factory(problem))

    factors = 1 / (1 + np.arange(10))  # weights of confident labels

    def first_round(received, data, cohort, previous):
        jobs = phase.prepare(received, data, cohort._replace(round=jnp.array([0])), previous)
        labels = jobs.work.labels
        labels = labels._replace(weights=labels.weights * factors)
        return jobs._replace(work=jobs.work._replace(labels=labels))

    own = {"unlabelled_shares": jnp.asarray(before, jnp.float32)}
    job, finished = train(phase._replace(prepare=first_round), received, data, 0, own)

    rows = np.asarray(data.client_index)[0, :10]
    labels = np.asarray(data.visible_labels)[rows]
    model, statistics = in_numpy(received.model.params), statistics_of(received.model)
    p, unlabelled = probabilities(model, pixels_of(data, rows, mirrored), statistics), labels < 0
    matched = np.zeros_like(p)
    matched[unlabelled] = scaled(p[unlabelled], before, 10.0)
    sure, pseudo = matched.max(axis=1) >= 0.75, matched.argmax(axis=1)
    assert 0 < sure.sum() < 6 and np.any((pseudo != p.argmax(axis=1))[sure])  # by matching alone
    now = 0.3 * before + 0.7 * np.bincount(p[unlabelled].argmax(axis=1), minlength=CLASSES) / 6
    given = np.bincount(labels[~unlabelled], minlength=CLASSES)

    average, velocity, number = (model, statistics), at_rest(model), 0
    labelled = batches(np.asarray(job.work.decks["labelled"].order), 4, config.batch_size)
    for step, of_step in enumerate(batches(np.asarray(job.work.decks["unlabelled"].order), 6, config.batch_size)):
        places = labelled[step]
        shares = (given + 6 * (before, now)[step // 2]) / 10  # an epoch has two steps
        adjusted = {**model, "bias": model["bias"] + 0.8 * 1 / 4 * np.log(shares)}
        known, strong = pixels_of(data, rows[places], mirrored), pixels_of(data, rows[of_step], negative)
        views = np.concatenate([known, strong])
        targets = np.eye(CLASSES)[np.concatenate([labels[places], pseudo[of_step]])]
        weights = np.concatenate([np.ones(len(known)) / len(known), (sure * factors)[of_step] / len(strong)])
        gradient = loss_and_gradient(adjusted, views, views.mean(axis=0), weights[:, None] * targets)[1]
        model, velocity = sgd_step(model, gradient, velocity, config, config.learning_rate)
        statistics, number = running_mean(statistics, views), number + len(known) + sure[of_step].sum()
        average = (
            {name: 0.6 * leaf + 0.4 * model[name] for name, leaf in average[0].items()},
            0.6 * average[1] + 0.4 * statistics,
        )
    assert_model(finished.upload.model, *average)
    np.testing.assert_allclose(job.own["unlabelled_shares"], now, atol=1e-6)
    assert finished.upload.metadata["labels_trained_on"] == number


def test_a_client_with_labels_alone_uploads_its_last_model():
    problem = small_problem("fedpdm", **{"fedpdm.ema_decay": 1.0, "client.epochs": 1})  # an average that stays
    (phase,) = phases_of(METHODS["fedpdm"].factory(problem))
    received, own = sent_down(problem), {"unlabelled_shares": jnp.asarray(SHARES, jnp.float32)}

    def first_round(received, data, cohort, previous):
        return phase.prepare(received, data, cohort._replace(round=jnp.array([0])), previous)

    for labels, stays in (([0, 1, 2], False), ([0, 1, -1], True)):
        upload = train(phase._replace(prepare=first_round), received, federation([labels]), 0, own)[1].upload
        kernels = (np.asarray(model.params["classifier"]["kernel"]) for model in (received.model, upload.model))
        assert np.array_equal(*kernels) == stays


def test_a_rule_for_the_labels_counts_unlabelled_images_alone():
    """The half of them with the largest matched probabilities; labelled ones are qualified anyway."""
    data = federation([[0, -1, -1, 2, 1, -1, -1, -1, -1, 1]])
    fields = {"confidence.kind": "share", "confidence.share": 0.5, "fedpdm.warm_up_rounds": 2}
    problem = small_problem("fedpdm", **fields)
    received, own = sent_down(problem), {"unlabelled_shares": jnp.asarray(SHARES, jnp.float32)}
    (phase,) = phases_of(METHODS["fedpdm"].factory(problem))

    def third_round(received, data, cohort, previous):  # the first one behind the warm-up
        return phase.prepare(received, data, cohort._replace(round=jnp.array([2])), previous)

    rows = np.asarray(data.client_index)[0, :10]
    unlabelled = np.asarray(data.visible_labels)[rows] < 0
    p = probabilities(in_numpy(received.model.params), pixels_of(data, rows, mirrored), statistics_of(received.model))
    false = Attackers(None, jnp.ones(len(data.inputs), bool))
    liar = data._replace(attackers=false)  # takes each image for one of the next class
    for shift, of_client in enumerate((data, liar)):
        report = prepare(phase._replace(prepare=third_round), received, of_client, 0, own).work.labels.report
        matched = scaled(np.roll(p[unlabelled], shift, axis=1), SHARES, 10.0)
        largest = matched.max(axis=1)
        np.testing.assert_array_equal(report.labels[unlabelled], matched.argmax(axis=1))
        np.testing.assert_array_equal(report.qualified[unlabelled], largest >= np.sort(largest)[3])
        assert np.all(report.qualified[~unlabelled])
