"""FixMatch at clients with a few labels, and beside a server with labels.

With labels at clients a step is that of kekmodel/FixMatch-pytorch@040be3b: train.py:324-348 and
google-research/fixmatch@d4985a1: fixmatch.py:86-110: hard labels from weak views, made in the step; a label counts from
the threshold on; the mean is over all unlabelled images of the batch. Neither is federated: the mean is FedAvg's. Both
exclude biases and normalisation from weight decay; the library applies `client.weight_decay` to all.

With labels at the server it is SemiFL's `fix-batch` with `ft=0` (src/modules/modules.py:151-174, 363-409 of its code at
4ec3663), but with FixMatch's mean over the whole batch: batch statistics also for labels; optimizers live for the whole
run; the server trains beside the clients with half the weight; and a momentum.
"""

import autograd.numpy as np
import jax
import pytest

from tests.official.consistency import CLIENTS, averaged, weak_logits
from tests.official.harness import agree, federation, make_problem, mirrored, rolled, train
from tests.official.reference import SGD, classify, cross_entropy, gradient, in_float64, softmax, weighted_mean

THRESHOLD = 0.5
SEMIFL = "diaoenmao/SemiFL-Semi-Supervised-Federated-Learning-for-Unlabeled-Clients-with-Alternate-Training"


@pytest.mark.parametrize("labels_from", ["local", pytest.param("received", marks=pytest.mark.slow)])
def test_rounds_of_fixmatch(labels_from):
    fields = {"confidence.threshold": THRESHOLD, "data.labels": "clients", "client.batch_size": 2,
              "confidence.labels_from": labels_from, "consistency.unlabelled_ratio": 2,
              "consistency.unlabelled_weight": 0.7}  # fmt: skip
    problem = make_problem("fixmatch", **fields)
    run = train(problem, federation(CLIENTS), rounds=3)
    accepted = []

    def loss(step):
        p = softmax(step.received if labels_from == "received" else weak_logits(step))
        labels, mask = np.argmax(p, axis=1), np.max(p, axis=1) >= THRESHOLD
        accepted.append(np.mean(mask))
        return 0.7 * np.mean(cross_entropy(step.strong[0], labels) * mask)

    model = averaged(run, loss, unlabelled_size=4)
    assert 0.1 < np.mean(accepted) < 0.9
    what = "labels at clients" if labels_from == "local" else "labels at clients, received model labels"
    agree("fixmatch", what, run, model, code="kekmodel/FixMatch-pytorch@040be3b: train.py:324-348")


@pytest.mark.slow
def test_rounds_beside_a_server():
    clients, anchors = [[-1] * 11, [-1] * 4, [-1] * 7], [0, 1, 2, 2, 1, 0, 1]
    fields = {"confidence.threshold": 0.6, "model.normalisation": "static",
              "client.batch_size": 3, "client.learning_rate": 0.03, "server.learning_rate": 0.03,
              "client.persistent": True, "server.persistent": True, "server.epochs": 2, "server.pretrain_epochs": 0,
              "server.augmentation": "weak", "aggregation.weights": "uniform", "aggregation.optimizer": "fedavgm",
              "aggregation.momentum": 0.5}  # fmt: skip
    # With the other tests' rate of .05 the momentum of the mean enlarges float32's rounding thirtyfold.
    problem = make_problem("fixmatch,parallel", **fields)
    run = train(problem, federation(clients, anchors), rounds=3)
    images, labels, config = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels), problem.config
    first = in_float64(run.states[0].model)
    params, statistics = first["params"], first["batch_stats"]
    of_server, velocity, confident = SGD.of(config.server), None, []
    of_client = [SGD.of(config.client) for _ in clients]

    def stepped(sgd, params, x, y, mask=1.0):
        losses = lambda p: cross_entropy(classify(p, statistics, x, True)[0], y)  # noqa: E731
        return sgd.step(params, gradient(lambda p: (np.mean(losses(p) * mask), None), params)[0])

    for of_round in run.rounds:
        server, (jobs,), uploads = params, of_round.jobs, []
        for step in range(4):  # two epochs of a full and a short batch
            rows = of_round.seen[step][1][: 3 if step % 2 else 4]
            server = stepped(of_server, server, mirrored(images[rows]), labels[rows])
        for job in jobs:
            local = params
            for rows in job.batches(config.client.batch_size):
                p = softmax(classify(local, statistics, mirrored(images[rows]), train=True)[0])
                mask = np.max(p, axis=1) >= 0.6
                confident.append(np.mean(mask))
                local = stepped(of_client[job.client], local, rolled(images[rows]), np.argmax(p, axis=1), mask)
            uploads.append(local)
        mean = weighted_mean([server, weighted_mean(uploads, [1, 1, 1])], [1, 1])
        change = jax.tree.map(np.subtract, params, mean)
        velocity = change if velocity is None else jax.tree.map(lambda v, c: 0.5 * v + c, velocity, change)
        params = jax.tree.map(np.subtract, params, velocity)
    assert 0.1 < np.mean(confident) < 0.9
    code = f"{SEMIFL}@4ec3663: src/modules/modules.py:151-174, 363-409"
    agree("fixmatch", "labels at the server, mean over the batch", run, {"params": params}, code=code)
