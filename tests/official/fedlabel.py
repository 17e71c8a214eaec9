"""FedLabel by its whole code (microsoft/msrflute@8bfe085).

core/trainer.py:503-619 (a client's two trainings), utils/utils.py:620-676 (the more confident expert) and
core/strategies/fedlabels.py:120-240 (the server). The code never clears the second training's gradients
(core/trainer.py:616-617); `fedlabel.replica` does the same and is off by default. The code's experts see one weak view
of each image, the library's see the image; here both see the image.
"""

import autograd.numpy as np
import jax
import pytest

from tests.official.harness import agree, federation, make_problem, mirrored, rolled, train
from tests.official.reference import classify, cross_entropy, gradient, in_float64, log_softmax, softmax, weighted_mean

CLIENTS = [[0, 1, -1, 2, 0, -1, -1, 2, -1, -1, 1], [2, -1, 0, -1, -1, 1, -1], [1, -1, 0, -1, 2, -1, -1, -1, -1]]
RATE, SIZE, THRESHOLD, BURN_IN, CONSISTENCY, PROXIMAL = 0.05, 5, 0.4, 1, 0.8, 10.0
FIELDS = {
    "client.learning_rate": RATE, "client.batch_size": SIZE, "client.momentum": 0.0, "client.nesterov": False,
    "client.weight_decay": 0.0, "client.clip_norm": 0.0, "fedlabel.labelled_steps": 5, "fedlabel.unlabelled_steps": 4,
    "confidence.threshold": THRESHOLD, "fedlabel.unlabelled_from": BURN_IN, "fedlabel.consistency_weight": CONSISTENCY,
}  # fmt: skip


@pytest.mark.parametrize("cleared", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rounds_of_fedlabel(cleared):
    fields = {"data.labels": "clients", "fedlabel.replica": not cleared, **FIELDS}
    problem = make_problem("fedlabel,code", **fields)
    run = train(problem, federation(CLIENTS), rounds=4, rests=(1,))
    images, labels = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels)
    model, kinds = in_float64(run.states[0].model), []

    def moved(params, slope):
        return jax.tree.map(lambda p, g: p - RATE * g, params, slope)

    for number, of_round in enumerate(run.rounds):
        supervised, unsupervised, weights = [], [], []
        for first, second in zip(*of_round.jobs):
            assert first.client == second.client
            local = on_labels(model, [(mirrored(images[rows]), labels[rows]) for rows in first.batches(SIZE)], moved)
            net, used, total = model, 0, None
            for rows in second.batches(SIZE) if number >= BURN_IN else []:
                kept, targets, ratios, same, by_local = experts(model, local, images[rows])
                kinds.extend(zip(kept, same))
                if not kept.any():
                    continue
                used += kept.sum()
                loss = loss_on_kept(
                    net, model, images[rows[kept]], targets, ratios[kept] * same[kept], same[kept], by_local
                )
                slope, statistics = gradient(loss, net["params"])
                total = slope if cleared or total is None else jax.tree.map(np.add, total, slope)
                net = {"params": moved(net["params"], total), "batch_stats": statistics}
            supervised.append(local)
            unsupervised.append(net)
            weights.append(max(used, 1))
        means = weighted_mean(supervised, [1] * len(supervised)), weighted_mean(unsupervised, weights)
        model = weighted_mean(means, [1, 1])

    assert all(len(set(kind)) == 2 for kind in zip(*kinds))  # some are kept, some not; experts agree, or do not
    what = "its code, gradients cleared" if cleared else "its code"
    agree(
        "fedlabel", what, run, model, code="microsoft/msrflute@8bfe085: core/trainer.py, core/strategies/fedlabels.py"
    )


def on_labels(model, batches, moved):
    """The supervised model after a step of plain SGD on each batch."""
    for x, y in batches:

        def loss(params, statistics=model["batch_stats"], x=x, y=y):
            logits, statistics = classify(params, statistics, x, train=True)
            return np.mean(cross_entropy(logits, y)), statistics

        slope, statistics = gradient(loss, model["params"])
        model = {"params": moved(model["params"], slope), "batch_stats": statistics}
    return model


def experts(received, local, x):
    """Which images are kept, their labels, h(other) / h(chosen), whether both agree, and log p of the local expert."""
    logits = [classify(model["params"], model["batch_stats"], x, train=False)[0] for model in (received, local)]
    p = np.stack([softmax(of_one) for of_one in logits])
    h = np.var(p, axis=2, ddof=1)
    surer = np.where(h[0] >= h[1], 0, 1)  # ties go to the received model
    rows = np.arange(len(x))
    kept = np.max(p[surer, rows], axis=1) > THRESHOLD
    targets = np.argmax(p[surer, rows], axis=1)[kept]
    ratios, same = h[1 - surer, rows] / h[surer, rows], np.argmax(p[0], axis=1) == np.argmax(p[1], axis=1)
    return kept, targets, ratios, same, log_softmax(logits[1])[kept]


def loss_on_kept(net, received, x, targets, weights, same, by_local):
    """The second training's loss: strong views come first, also for the running statistics."""

    def loss(params):
        of_strong, statistics = classify(params, net["batch_stats"], rolled(x), train=True)
        of_images, statistics = classify(params, statistics, x, train=True)
        divergence = np.sum(np.exp(by_local) * (by_local - log_softmax(of_images)), axis=1)
        consistency = np.sum(weights * divergence) / max(np.sum(same), 1)
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(received["params"]))
        distance = sum(np.mean((a - b) ** 2) for a, b in pairs)
        value = np.mean(cross_entropy(of_strong, targets)) + CONSISTENCY * consistency + PROXIMAL * distance
        return value, statistics

    return loss
