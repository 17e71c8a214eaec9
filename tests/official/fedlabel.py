"""FedLabel by its whole code (microsoft/msrflute@8bfe085), and by its paper, the library's default.

core/trainer.py:503-619 (a client's two trainings), utils/utils.py:620-676 (the more confident expert) and
core/strategies/fedlabels.py:120-240 (the server). The code never clears the second training's gradients
(core/trainer.py:616-617); `fedlabel.replica` does the same and is off by default. The code's experts see one weak view
of each image, the library's see the image; here both see the image. By the paper (eq. 1 to 9) a client sends one model
with both changes; here one of its clients has no labels.
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


CLEARED, CODE, PAPER = "its code, gradients cleared", "its code", "its paper"


@pytest.mark.parametrize("case", [*(pytest.param(case, marks=pytest.mark.slow) for case in (CLEARED, CODE)), PAPER])
def test_rounds_of_fedlabel(case):
    as_in_code, cleared = case != PAPER, case != CODE
    clients = CLIENTS if as_in_code else [CLIENTS[0], [-1] * 7, CLIENTS[2]]
    fields = {"data.labels": "clients", "fedlabel.replica": not cleared, **FIELDS}
    problem = make_problem("fedlabel,code" if as_in_code else "fedlabel", **fields)
    run = train(problem, federation(clients), rounds=4, rests=(1,))
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
                x, (kept, targets, ratios, same, other, by_local) = images[rows], experts(model, local, images[rows])
                kinds.extend(zip(kept, same))
                if not kept.any():
                    continue
                used += kept.sum()
                if as_in_code:
                    weights_of_kept = ratios[kept] * same[kept]
                    loss = loss_on_kept(net, model, x[kept], targets[kept], weights_of_kept, same[kept], by_local[kept])
                else:
                    loss = loss_on_all(net, x, kept, targets, ratios * same, other)
                slope, statistics = gradient(loss, net["params"])
                total = slope if cleared or total is None else jax.tree.map(np.add, total, slope)
                net = {"params": moved(net["params"], total), "batch_stats": statistics}
            supervised.append(local)
            unsupervised.append(net)
            on_labels_too = 5 * min(sum(label >= 0 for label in clients[first.client]), SIZE)
            weights.append(max(used, 1) if as_in_code else on_labels_too + used)
        if as_in_code:
            means = weighted_mean(supervised, [1] * len(supervised)), weighted_mean(unsupervised, weights)
            model = weighted_mean(means, [1, 1])
        else:
            uploads = [both_changes(model, *pair) for pair in zip(supervised, unsupervised)]
            model = weighted_mean(uploads, weights)

    assert all(len(set(kind)) == 2 for kind in zip(*kinds))  # some are kept, some not; experts agree, or do not
    code = "microsoft/msrflute@8bfe085: core/trainer.py, core/strategies/fedlabels.py"
    agree("fedlabel", case, run, model, code=code if as_in_code else "no code: by its paper's equations 1 to 9")


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
    """What is kept, its labels, h(other) / h(chosen), whether both agree, log p of the other and the local expert."""
    logits = [classify(model["params"], model["batch_stats"], x, train=False)[0] for model in (received, local)]
    p, log_p = np.stack([softmax(of_one) for of_one in logits]), np.stack([log_softmax(of_one) for of_one in logits])
    h = np.var(p, axis=2, ddof=1)
    surer = np.where(h[0] >= h[1], 0, 1)  # ties go to the received model
    rows = np.arange(len(x))
    kept, targets = np.max(p[surer, rows], axis=1) > THRESHOLD, np.argmax(p[surer, rows], axis=1)
    ratios, same = h[1 - surer, rows] / h[surer, rows], np.argmax(p[0], axis=1) == np.argmax(p[1], axis=1)
    return kept, targets, ratios, same, log_p[1 - surer, rows], log_p[1]


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


def loss_on_all(net, x, kept, targets, weights, other):
    """Eq. 8, over the whole batch; KL(p, s) from the other expert."""

    def loss(params):
        of_strong, statistics = classify(params, net["batch_stats"], rolled(x), train=True)
        of_images, statistics = classify(params, statistics, x, train=True)
        log_p = log_softmax(of_images)
        consistency = weights * np.sum(np.exp(log_p) * (log_p - other), axis=1)
        return np.mean(kept * (cross_entropy(of_strong, targets) + CONSISTENCY * consistency)), statistics

    return loss


def both_changes(received, local, net):
    """w + (w_L - w) + (w_U - w), and the mean of the statistics of the phases that took a step."""
    params = jax.tree.map(lambda w, own, u: own + u - w, *(model["params"] for model in (received, local, net)))
    stepped = [model["batch_stats"] for model in (local, net) if model is not received] or [received["batch_stats"]]
    return {"params": params, "batch_stats": weighted_mean(stepped, [1] * len(stepped))}
