"""imFed-Semi: the server's warm-up, dynamic banks and sub-bank classification at the clients, the server's epoch.

med-air/imFedSemi@a1e875f: train_main.py, local_supervised.py, local_unsupervised.py, data/dataset.py (`get_sub_banks`,
`calculate_bank`), networks/models.py (`TransFunc`), utils/losses.py, FedAvg.py. Here SGD is in place of Adam, banks and
proportions are of the same views of all images, and predictions, not hidden labels, divide a client's images.
"""

import autograd.numpy as np
import numpy
import pytest

from fedjax_ssl.methods.imfed_semi import drawn_proportions
from tests.official.harness import CLASSES, agree, federation, make_problem, mirrored, train
from tests.official.reference import (
    SGD,
    classify,
    cross_entropy,
    in_float64,
    log_softmax,
    softmax,
    trained,
    weighted_mean,
)

ANCHORS = [0, 1, 2, 2, 1, 0, 0, 1]
CLIENTS = [[-1] * 17, [-1] * 14, [-1] * 11]
CODE = (
    "med-air/imFedSemi@a1e875f: train_main.py, local_supervised.py, local_unsupervised.py, data/dataset.py, "
    "networks/models.py, FedAvg.py, utils/losses.py"
)
WARM_UP, LOW, HIGH, BATCH = 2, 0.56, 0.58, 4
CASES = {"its code": "imfed_semi,code", "cross-entropy of the posterior": "imfed_semi"}


def sub_banks_of(labels, wanted):
    """The sub-bank of each image, by its label."""
    size, found = len(labels) // CLASSES, np.full(len(labels), CLASSES - 1)
    for c in range(CLASSES):
        images, start = np.flatnonzero(labels == c), 0
        for bank in range(CLASSES - 1):
            number = int(size * wanted[bank][c])
            found[images[start : start + number]] = bank
            start += number
    return found


def trans_func(g, pi, priors):
    """The sub-banks' posterior, [B, S]."""
    mixed = (pi @ g.T).T * priors
    return mixed / np.sum(mixed, axis=1, keepdims=True)


@pytest.mark.parametrize("case", [pytest.param("its code", marks=pytest.mark.slow), list(CASES)[1]])
def test_rounds_of_imfed_semi(case):
    problem = make_problem(CASES[case], **{
        "imfed_semi.confident": LOW, "imfed_semi.very_confident": HIGH, "server.pretrain_epochs": WARM_UP,
        "server.pretrain_learning_rate": 0.05, "aggregation.weights": "uniform", "client.learning_rate": 0.3,
        "client.nesterov": False,
    })  # fmt: skip
    run = train(problem, federation(CLIENTS, ANCHORS, seed=3), rounds=3)
    images, labels = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels)
    at_server, at_clients = SGD.of(problem.config.server), [SGD.of(problem.config.client) for _ in CLIENTS]
    lasting, seen = [set(), set(), set()], {"old": 0, "left out": 0, "trained": 0}
    first = in_float64(run.fresh)
    model = {"params": first["params"], "batch_stats": first["batch_stats"]}

    def smoothed(logits, y):
        return np.mean(0.9 * cross_entropy(logits, y) - 0.1 * np.sum(log_softmax(logits), axis=1) / CLASSES)

    def server_trains(model, observed, epochs):
        found = [rows for _, rows in observed if len(rows) == BATCH and max(rows) < len(ANCHORS) and min(rows) >= 0]
        assert len(found) == 2 * epochs * len(ANCHORS) // BATCH  # two views

        def loss(params, statistics, batch):
            one, statistics = classify(params, statistics, mirrored(images[batch]), train=True)
            other, statistics = classify(params, statistics, mirrored(images[batch]), train=True)
            return smoothed(one, labels[batch]) + smoothed(other, labels[batch]), statistics

        return trained(model, at_server, found[::2], loss)

    def client_trains(model, job):
        client = job.client
        rows = np.asarray(run.data.client_index)[client, : len(CLIENTS[client])]
        p = softmax(classify(model["params"], model["batch_stats"], mirrored(images[rows]), train=False)[0])
        best, guess = p.max(axis=1), p.argmax(axis=1)
        lasting[client] |= set(np.flatnonzero(best > HIGH))
        now = set(np.flatnonzero(best > LOW))
        seen["old"] += len(lasting[client] - now)
        seen["left out"] += len(rows) - len(now)
        sub_banks = sub_banks_of(guess, np.asarray(drawn_proportions(run.data.seed, client, CLASSES)))
        pi = np.zeros((CLASSES, CLASSES))
        for image in now | lasting[client]:
            pi[sub_banks[image], guess[image]] += 1
        pi = pi / np.maximum(pi.sum(axis=1, keepdims=True), 1)
        priors = np.bincount(sub_banks, minlength=CLASSES) / len(rows)
        numpy.testing.assert_array_equal(job.report.labels[: len(rows)], guess)
        numpy.testing.assert_array_equal(job.report.qualified[: len(rows)], best > LOW)
        place = {row: number for number, row in enumerate(rows)}
        assert len(job.batches(BATCH)) == problem.config.client.epochs * (len(now) // BATCH or 1)  # whole ones

        def loss(params, statistics, batch):
            places = [place[row] for row in batch]
            assert set(places) <= now
            seen["trained"] += len(batch)
            logits, statistics = classify(params, statistics, mirrored(images[batch]), train=True)
            q, targets = trans_func(softmax(logits), pi, priors), sub_banks[places]
            of_target = -np.log(q[np.arange(len(q)), targets])
            return np.mean(cross_entropy(q, targets) if case == "its code" else of_target), statistics

        return trained(model, at_clients[client], job.batches(BATCH), loss)

    model = server_trains(model, run.init.seen, WARM_UP)
    for of_round in run.rounds:
        uploads = [client_trains(model, job) for job in of_round.jobs[0] if job.num_steps]
        model = server_trains(weighted_mean(uploads, [1] * len(uploads)), of_round.seen, 1)
    agree("imfed_semi", case, run, model, code=CODE)
    assert all(seen.values()), seen
    banks = [set(np.flatnonzero(bank)) for bank in np.asarray(run.states[-1].clients["bank"])]
    assert banks == lasting
