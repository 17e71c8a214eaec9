"""BSemiFL: labels by the received and the local model, weighted by their closeness to the image.

No code is public: by the equations of docs/methods/bsemifl.md, within SemiFL's alternate training.
"""

import autograd.numpy as np

from tests.official.alternate import BATCH, SETTING, rounds_of
from tests.official.harness import agree, federation, make_problem, rolled, train
from tests.official.reference import SGD, classify, cross_entropy, gradient, softmax

CLIENTS, ANCHORS = [[-1] * 13, [-1] * 6, [-1] * 9], [0, 1, 2, 2, 1, 0, 1]
THRESHOLD, ROUNDS = 0.5, 3


def test_rounds_of_bsemifl(monkeypatch):
    monkeypatch.setattr("fedjax_ssl.server.statistics.BATCH_SIZE", BATCH)
    fields = {**SETTING, "num_rounds": ROUNDS, "confidence.threshold": THRESHOLD}
    run = train(make_problem("bsemifl,strong", **fields), federation(CLIENTS, ANCHORS), rounds=ROUNDS)
    images, config = np.asarray(run.data.inputs), run.problem.config
    local, of_clients = {}, [SGD.of(config.client) for _ in CLIENTS]
    accepted, shares = [], []

    def logits(model, x):
        return classify(*model, x, train=False)[0]

    def mass(scores):
        return np.sum(np.exp(scores), axis=1)

    def train_client(factor, params, statistics, job):
        received, of_client = (params, statistics), of_clients[job.client]
        rows = np.asarray(run.data.client_index[job.client, : len(CLIENTS[job.client])])
        both = [logits(model, images[rows]) for model in (received, local.get(job.client, received))]
        on_labels = np.sum(mass(logits(received, images[: len(ANCHORS)])))
        dense = [mass(both[0]) / on_labels, mass(both[1]) / np.sum(mass(both[1]))]
        share = (dense[0] / (dense[0] + dense[1]))[:, None]
        p = share * softmax(both[0]) + (1 - share) * softmax(both[1])
        chosen, guess = rows[np.max(p, axis=1) >= THRESHOLD], dict(zip(rows, np.argmax(p, axis=1)))
        batches, of_client.rate = job.batches(4), config.client.learning_rate * factor
        assert {row for batch in batches for row in batch} == set(chosen)
        accepted.append(len(chosen) / len(rows))
        shares.extend(share.ravel() if job.client in local else [])
        for batch in batches:
            y = np.array([guess[row] for row in batch])

            def loss(params, batch=batch, y=y):
                scores, _ = classify(params, statistics, rolled(images[batch]), train=True)
                return np.mean(cross_entropy(scores, y)), None

            params = of_client.step(params, gradient(loss, params)[0])
        if not batches:
            return None
        local[job.client] = params, statistics
        return params

    expected = rounds_of(run, train_client)
    agree("bsemifl", "three rounds", run, expected, code="no code: by the equations of its page")
    assert 0.1 < np.mean(accepted) < 1 and np.ptp(shares) > 0.1
