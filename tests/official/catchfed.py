"""CATCHFed: thresholds of each client and class, energy, consistency of the images without a pseudo-label.

No code is public: by the equations of docs/methods/catchfed.md, within SemiFL's alternate training.
"""

import autograd.numpy as np

from tests.official.alternate import BATCH, SETTING, rounds_of
from tests.official.harness import agree, federation, make_problem, mirrored, rolled, train
from tests.official.reference import SGD, classify, cross_entropy, gradient, log_softmax, softmax

CLIENTS, ANCHORS = [[-1] * 13, [-1] * 6, [-1] * 9], [0, 1, 2, 2, 1, 0, 1]
THRESHOLD, ENERGY, WEIGHT, ROUNDS = 0.45, -1.18, 0.7, 3


def test_rounds_of_catchfed(monkeypatch):
    monkeypatch.setattr("fedjax_ssl.server.statistics.BATCH_SIZE", BATCH)
    fields = {
        **SETTING, "num_rounds": ROUNDS, "confidence.threshold": THRESHOLD, "catchfed.energy": ENERGY,
        "catchfed.consistency_weight": WEIGHT,
    }  # fmt: skip
    run = train(make_problem("catchfed,strong", **fields), federation(CLIENTS, ANCHORS), rounds=ROUNDS)
    images, config = np.asarray(run.data.inputs), run.problem.config
    of_clients, by_rule, by_energy, thresholds = [SGD.of(config.client) for _ in CLIENTS], [], [], []

    def train_client(factor, params, statistics, job):
        of_client = of_clients[job.client]
        rows = np.asarray(run.data.client_index[job.client, : len(CLIENTS[job.client])])
        scores = classify(params, statistics, mirrored(images[rows]), train=False)[0]
        p = softmax(scores)
        guess, sure = np.argmax(p, axis=1), np.max(p, axis=1) >= THRESHOLD
        counts = np.array([np.sum(sure & (guess == label)) for label in range(p.shape[1])])
        learnt = counts / max(counts.max(), len(rows) - counts.sum())
        needed = THRESHOLD * learnt / (2 - learnt)
        passed, known = np.max(p, axis=1) >= needed[guess], -np.log(np.sum(np.exp(scores), axis=1)) <= ENERGY
        by_rule.extend(passed), by_energy.extend(known), thresholds.extend(needed)
        of_row = {row: (p[i], guess[i], passed[i] & known[i]) for i, row in enumerate(rows)}
        of_client.rate = config.client.learning_rate * factor
        for batch in job.batches(4):
            target, y, counts = (np.array(column) for column in zip(*(of_row[row] for row in batch)))

            def loss(params, batch=batch, target=target, y=y, counts=counts):
                strong, _ = classify(params, statistics, rolled(images[batch]), train=True)
                apart = np.sum(target * (np.log(target) - log_softmax(strong)), axis=1)
                return np.mean(counts * cross_entropy(strong, y) + WEIGHT * ~counts * apart), None

            params = of_client.step(params, gradient(loss, params)[0])
        return params

    expected = rounds_of(run, train_client)
    agree("catchfed", "three rounds", run, expected, code="no code: by the equations of its page")
    assert all(0.1 < np.mean(share) < 0.9 for share in (by_rule, by_energy)) and np.std(thresholds) > 0.01
