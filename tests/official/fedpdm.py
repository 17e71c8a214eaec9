"""FedPDM (ldpbuaa/FedPDM@0b835db: fed/sessions/pdmprocess.py, fedpdm.py, fed/pretty/pdm.py).

The code makes labels batch by batch. Here all images of a client are one batch of the first epoch, and views draw
nothing, so later epochs have the same labels.
"""

import autograd.numpy as np

from tests.official.harness import CLASSES, agree, federation, make_problem, mirrored, rolled, train
from tests.official.reference import (
    SGD,
    classify,
    cross_entropy,
    gradient,
    in_float64,
    log_softmax,
    softmax,
    weighted_mean,
)

CLIENTS = [[0, 1, -1, -1, 2, -1, -1, 1, -1], [-1] * 11, [2, 0, 1, 1, 0]]
ROUNDS, THRESHOLD, DECAY, ADJUSTMENT = 3, 0.5, 0.9, 0.7


class Matching:
    """`PDM` in fed/pretty/pdm.py."""

    def __init__(self, number):
        self.cost, self.number = np.zeros((number + 1, CLASSES + 1)), number

    def get(self, p, shares):
        log_p = log_softmax(p)  # of probabilities
        self.cost[:-1, :-1] = -log_p
        u = np.zeros(self.number + 1)
        u[:-1] = -_logsumexp(-10 * self.cost[:-1], 1)
        columns, miss, iterations = np.append(1 + self.number * shares, 1.0), np.inf, 0
        while miss >= 0.01 and iterations < 20:
            v = np.log(columns) - _logsumexp(-10 * self.cost + u[:, None], 0)
            v = v - v[:-1].mean()
            u = -_logsumexp(-10 * self.cost + v, 1)
            u[-1] += np.log(1 + CLASSES)
            sums = np.exp(-10 * self.cost + v + u[:, None]).sum(axis=0)
            miss, iterations = np.abs(sums - columns).sum() / columns.sum(), iterations + 1
        z = np.tile(v, (self.number, 1))
        z[:, :-1] += 10 * log_p
        return softmax(z)[:, :-1]


def _logsumexp(x, axis):
    return np.log(np.exp(x).sum(axis=axis))


def test_rounds_of_fedpdm():
    fields = {"fedpdm.ema_decay": DECAY, "fedpdm.adjustment": ADJUSTMENT, "confidence.threshold": THRESHOLD}
    problem = make_problem("fedpdm", **fields, **{"client.batch_size": 4})
    run = train(problem, federation(CLIENTS), rounds=ROUNDS)
    config, images, labels = problem.config.client, np.asarray(run.data.inputs), np.asarray(run.data.visible_labels)
    model, shares = in_float64(run.states[0].model), [np.full(CLASSES, 1 / CLASSES) for _ in CLIENTS]
    seen = []

    def train_client(job, model, number_of_round):
        rows = np.asarray(run.data.client_index)[job.client][: len(CLIENTS[job.client])]
        unlabelled, before = rows[labels[rows] < 0], shares[job.client]
        counts = np.bincount(labels[rows][labels[rows] >= 0], minlength=CLASSES)
        pseudo, sure = {}, {}
        if len(unlabelled):
            p = softmax(classify(model["params"], model["batch_stats"], mirrored(images[unlabelled]), False)[0])
            matched = p if number_of_round == 1 else Matching(len(unlabelled)).get(p, before)
            seen.extend(zip(np.max(p, axis=1) >= THRESHOLD, np.max(matched, axis=1) >= THRESHOLD))
            pseudo = dict(zip(unlabelled.tolist(), np.argmax(matched, axis=1)))
            sure = dict(zip(unlabelled.tolist(), np.max(matched, axis=1) >= THRESHOLD))
            histogram = np.bincount(np.argmax(p, axis=1), minlength=CLASSES) / len(unlabelled)
            shares[job.client] = 0.99 * histogram + 0.01 * before
        params, statistics, number = model["params"], model["batch_stats"], 0
        average, sgd = model, SGD.of(config)
        batches = job.batches(4), job.batches(4, job.work.decks["labelled"])
        epoch_length = len(batches[0]) // config.epochs
        for step in range(max(map(len, batches)) if not batches[0] else len(batches[0])):
            u, x = (of_deck[step % len(of_deck)] if of_deck else np.array([], int) for of_deck in batches)
            estimate = before if not epoch_length or step < epoch_length else shares[job.client]
            mixed = counts + len(unlabelled) * estimate
            tau = ADJUSTMENT * number_of_round / ROUNDS * np.log(mixed / mixed.sum() + 1e-12)
            mask = np.array([sure[row] for row in u.tolist()]) * 1.0
            targets = np.array([pseudo[row] for row in u.tolist()], int)

            def loss(params, u=u, x=x, tau=tau, mask=mask, targets=targets, statistics=statistics):
                views = np.concatenate([mirrored(images[x]), rolled(images[u])])
                logits, new = classify(params, statistics, views, train=True)
                logits, value = logits + tau, 0.0
                if len(x):
                    value = value + np.mean(cross_entropy(logits[: len(x)], labels[x]))
                if len(u):
                    value = value + np.mean(cross_entropy(logits[len(x) :], targets) * mask)
                return value, new

            slope, statistics = gradient(loss, params)
            params = sgd.step(params, slope)
            number += len(x) + mask.sum()
            now = {"params": params, "batch_stats": statistics}
            average = _mixed(average, now)
        return average if len(unlabelled) else now, number

    def _mixed(old, new):
        return weighted_mean([old, new], [DECAY, 1 - DECAY])

    for number_of_round, of_round in enumerate(run.rounds, start=1):
        (jobs,) = of_round.jobs
        uploads, numbers = zip(*(train_client(job, model, number_of_round) for job in jobs))
        model = weighted_mean(list(uploads), numbers)
    assert len(set(seen)) >= 3  # matching adds labels, and some stay out
    agree(
        "fedpdm",
        "three rounds",
        run,
        model,
        code="ldpbuaa/FedPDM@0b835db: fed/sessions/pdmprocess.py, fed/pretty/pdm.py",
    )
