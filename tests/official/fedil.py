"""FedIL by the algorithms of its paper (arXiv 2302.11823); its code is not public.

Algorithms 1 and 2: eq. 22 (the server trains first), 7 to 12 (labels, divergence), 14 to 21 (which labels join the set,
and its loss), 24 to 26 (which updates are in the mean). docs/methods/fedil.md says what the paper leaves open.
Statistics are static: the server's images give those of the server's model, all images those of the global model.
"""

import autograd.numpy as np
import jax
import pytest

from tests.official.alternate import BATCH, anchor_batches, classified, statistics_of
from tests.official.harness import agree, federation, make_problem, mirrored, rolled, train
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

CLIENTS, ANCHORS = [[-1] * 13, [-1] * 6, [-1] * 9], [0, 1, 2, 2, 1, 0, 1]
THRESHOLD, SUCCESSIVE, EPOCHS, ROUNDS = 0.6, 2, 2, 4
FIELDS = {
    "model.normalisation": "static", "model.statistics": "all_mixed", "server.epochs": EPOCHS, "server.batch_size": 5,
    "server.augmentation": "weak", "server.pretrain_epochs": 0, "server.persistent": False,
    "client.persistent": False, "client.epochs": EPOCHS, "fedil.successive": SUCCESSIVE,
    "confidence.threshold": THRESHOLD,
}  # fmt: skip


def flat(params, start):
    return np.concatenate([(a - b).ravel() for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(start))])


def steps_seen(of_round, anchors, label_set):
    """For each step of a client: the batch, and the images drawn from its set (the batch again while the set is empty).

    Jobs run one after the other, the longest first. A step calls a strong and a weak view of its batch, and a weak view
    of the images from the set, if there is one.
    """
    calls = 2 + label_set
    at_clients = [call for call in of_round.seen if call[1][0] >= anchors]  # padding follows the rows
    jobs = sorted(of_round.jobs[0], key=lambda job: -job.num_steps)
    assert len(at_clients) == calls * sum(job.num_steps for job in jobs)
    steps = iter([at_clients[first : first + calls] for first in range(0, len(at_clients), calls)])
    found = {}
    for job in jobs:
        found[job.client] = []
        for rows in job.batches(4):
            step = next(steps)
            (strong,) = [of for name, of in step if name == "strong"]
            weak = [of for name, of in step if name == "weak"]
            assert np.array_equal(strong[: len(rows)], rows)
            others = [of for of in weak if not np.array_equal(of, strong)]
            found[job.client].append((rows, (others or weak)[0][: len(rows)]))
    return found


CASES = {"counted by rounds": {}, "counted by epochs": {"fedil.count_per": "epoch"}}
CASES["without the set"] = {"fedil.label_set": False}
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in list(CASES)[1:]]


@pytest.mark.parametrize("case", ["counted by rounds", *SLOW])
def test_rounds_of_fedil(case, monkeypatch):
    monkeypatch.setattr("fedjax_ssl.server.statistics.BATCH_SIZE", BATCH)
    data = federation(CLIENTS, ANCHORS, seed=2)  # with others most updates are screened out, or the set stays empty
    run = train(make_problem("fedil", **FIELDS, **CASES[case]), data, rounds=ROUNDS)
    images, labels, config = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels), run.problem.config
    options, params = config.fedil, in_float64(run.fresh)["params"]
    statistics = statistics_of(params, images)
    counts, in_set = {}, {}  # by row of the table: (label, how often in a row), and the set's labels
    confident_shares, used_set, passed = [], 0, []

    def logits(params, x):
        return classify(params, statistics, x, train=True)[0]

    for of_round in run.rounds:
        at_server = anchor_batches(of_round.seen, len(ANCHORS), 5, EPOCHS)
        batches = [(mirrored(images[rows]), labels[rows]) for rows in at_server]
        server = classified(SGD.of(config.server), params, statistics, batches)
        of_server, uploads, known = statistics_of(server, images[: len(ANCHORS)]), [], dict(in_set)
        for client, steps in steps_seen(of_round, len(ANCHORS), options.label_set).items():
            local, sgd = params, SGD.of(config.client)
            for step, (rows, drawn) in enumerate(steps):
                weak, strong = mirrored(images[rows]), rolled(images[rows])
                reference = classify(server, of_server, weak, train=False)[0]
                p = softmax(logits(local, weak))
                guess, mask = np.argmax(p, axis=1), np.max(p, axis=1) >= THRESHOLD
                confident_shares.append(np.mean(mask))
                has_set = options.label_set and any(row in known for row in rows_of(run, client))
                used_set += has_set
                assert not has_set or all(row in known for row in drawn)

                of_set = (mirrored(images[drawn]), np.array([known[row] for row in drawn])) if has_set else None

                def loss(params, weak=weak, strong=strong, guess=guess, mask=mask, reference=reference, of_set=of_set):
                    apart = softmax(reference) * (log_softmax(reference) - log_softmax(logits(params, weak)))
                    value = np.mean(cross_entropy(logits(params, strong), guess) * mask)
                    value = value + np.mean(np.sum(apart, axis=1))
                    if of_set is not None:
                        value = value + np.mean(cross_entropy(logits(params, of_set[0]), of_set[1]))
                    return value, None

                local = sgd.step(local, gradient(loss, local)[0])
                if options.count_per == "epoch" or step >= len(steps) // EPOCHS * (EPOCHS - 1):
                    credible = mask & (np.argmax(reference, axis=1) == guess)
                    for row, label, counted in zip(rows, guess, credible):
                        if row in in_set:
                            continue
                        old = counts.get(row, (None, 0))
                        counts[row] = (label, old[1] + 1 if old[0] == label else 1) if counted else (None, 0)
                        if counts[row][1] >= SUCCESSIVE:
                            in_set[row] = label
            uploads.append(local)
        pull = flat(server, params)
        chosen = [upload for upload in uploads if flat(upload, params) @ pull >= 0]
        passed.append(len(chosen))
        params = weighted_mean(chosen, [1] * len(chosen)) if chosen else params
        statistics = statistics_of(params, images)
    assert 0.1 < np.mean(confident_shares) < 0.95 and bool(used_set) == options.label_set and 0 < len(in_set) < 28
    assert sum(passed) == 3 * ROUNDS - sum(metrics["screened_out"] for metrics in run.metrics)
    code = "no code: by the paper's algorithms 1 and 2"
    agree("fedil", case, run, {"params": params, "batch_stats": statistics}, code=code)


def rows_of(run, client):
    return np.asarray(run.data.client_index[client, : len(CLIENTS[client])])
