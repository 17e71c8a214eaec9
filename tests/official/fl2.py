"""(FL)^2: adaptive thresholds, consistency under the worst perturbation, uploads weighted by doubt.

seungjoo-ai/FLFL-NeurIPS24@decdf7d: src/algorithm/flfl.py:41-84, 124-165 (a step, and labels once a round),
algorithm/sam.py:16-62 (ASAM), algorithm/criterion.py, modules/client.py:24-75 (images that do not count are left out),
modules/server.py:50-101 (the mean and its momentum), 122-152 (one optimizer from pre-training on), data.py:190-213
(statistics), train_classifier_flfl.py:88-134 (order). Its schedule is made but never stepped.
"""

import autograd.numpy as np
import jax
import pytest

from tests.official.alternate import BATCH, Mean, anchor_batches, classified, statistics_of
from tests.official.harness import agree, federation, make_problem, mirrored, rolled, train
from tests.official.reference import SGD, classify, cross_entropy, gradient, in_float64, log_softmax, softmax

CLIENTS, ANCHORS = [[-1] * 13, [-1] * 6, [-1] * 9], [0, 1, 2, 2, 1, 0, 1, 0]
RADIUS, FIXED, PRETRAINED, EPOCHS = 0.3, 0.6, 3, 2
FIELDS = {
    "client.batch_size": 5, "server.epochs": EPOCHS, "server.batch_size": 5, "server.augmentation": "weak",
    "server.pretrain_epochs": PRETRAINED, "server.pretrain_learning_rate": 0.05, "confidence.threshold": FIXED,
    "fl2.radius": RADIUS, "model.normalisation": "static", "model.statistics": "all_mixed",
}  # fmt: skip


def perturbed(params, slope, adaptive):
    """w + eps along the gradient: adaptive scales each weight by its size except biases; otherwise plain SAM."""

    def size(path, leaf):
        return np.abs(leaf) + 0.01 if adaptive and path[-1].key != "bias" else np.ones_like(leaf)

    sizes = jax.tree.map_with_path(size, params)
    scaled = jax.tree.map(np.multiply, sizes, slope)
    length = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(scaled))) + 1e-16
    return jax.tree.map(lambda p, t, g: p + RADIUS * t * g / length, params, sizes, scaled)


@pytest.mark.parametrize("perturbation", ["asam", pytest.param("sam", marks=pytest.mark.slow)])
def test_rounds_of_fl2(perturbation, monkeypatch):
    monkeypatch.setattr("fedjax_ssl.server.statistics.BATCH_SIZE", BATCH)
    arguments = "fl2,strong,code" + (",sam" if perturbation == "sam" else "")
    run = train(make_problem(arguments, **FIELDS), federation(CLIENTS, ANCHORS), rounds=3)
    images, labels, config = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels), run.problem.config
    params = in_float64(run.fresh)["params"]
    of_server, of_clients, mean = SGD.of(config.server), [SGD.of(config.client) for _ in CLIENTS], Mean(0.5)
    counted, surest, both = [], [], 0

    def logits(params, x):
        return classify(params, statistics, x, train=True)[0]

    def server_epochs(params, seen, epochs):
        batches = anchor_batches(seen, len(ANCHORS), 5, epochs)
        return classified(of_server, params, statistics, [(mirrored(images[rows]), labels[rows]) for rows in batches])

    statistics = in_float64(run.fresh)["batch_stats"]
    params = server_epochs(params, run.init.seen, PRETRAINED)
    statistics = statistics_of(params, images)

    for of_round in run.rounds:
        uploads, doubts = [], []
        for job in of_round.jobs[0]:
            local, rows = params, np.asarray(run.data.client_index[job.client, : len(CLIENTS[job.client])])
            p = softmax(classify(params, statistics, mirrored(images[rows]), train=False)[0])
            confidence, guess = np.max(p, axis=1), dict(zip(rows, np.argmax(p, axis=1)))
            by_class = np.mean(p, axis=0) / np.max(np.mean(p, axis=0))
            chosen = rows[confidence >= np.mean(confidence) * by_class[np.argmax(p, axis=1)]]
            sure = set(rows[confidence >= FIXED])
            assert {row for batch in job.batches(5) for row in batch} == set(chosen)
            counted.append(len(chosen) / len(rows))
            for batch in job.batches(5):
                x, y = rolled(images[batch]), np.array([guess[row] for row in batch])
                mask = np.array([row in sure for row in batch])
                surest.append(np.mean(mask))
                before, total = logits(local, x), len(batch)

                def adaptive(params, x=x, y=y):
                    return np.mean(cross_entropy(logits(params, x), y)), None

                def of_surest(params, x=x, y=y, mask=mask):
                    return np.sum(cross_entropy(logits(params, x), y) * mask) / max(np.sum(mask), 1), None

                def consistency(params, x=x, mask=mask, before=before, total=total):
                    apart = softmax(before) * (log_softmax(before) - log_softmax(logits(params, x)))
                    return np.sum(np.sum(apart, axis=1) * mask) / total, None

                moved = perturbed(local, gradient(of_surest, local)[0], perturbation == "asam")
                slopes = gradient(adaptive, local)[0], gradient(consistency, moved)[0]
                local = of_clients[job.client].step(local, jax.tree.map(np.add, *slopes))
            uploads.append(local)
            doubts.append(1 - np.mean(confidence))
        params = server_epochs(mean.step(params, uploads, doubts), of_round.seen, EPOCHS)
        statistics = statistics_of(params, images)
        both += np.ptp(doubts) > 0.01
    assert both and min(counted) < 1 and 0.1 < np.mean(surest) < 0.9
    what = "its code, ASAM" if perturbation == "asam" else "its code, SAM as in equation 12"
    files = "src/algorithm/flfl.py, sam.py, modules/client.py, server.py, data.py"
    code = f"seungjoo-ai/FLFL-NeurIPS24@decdf7d: {files}"
    agree("fl2", what, run, {"params": params, "batch_stats": statistics}, code=code)
