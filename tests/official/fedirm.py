"""FedIRM: relation matrices of the client with labels, mean teachers and relation matching at the others, a plain mean.

liuquande/FedIRM@cfe0495: train_main.py (warm-up, the mean of the matrices, which the next round uses), FedAvg.py,
local_supervised.py, local_unsupervised.py, confuse_matrix.py (`get_confuse_matrix`, `kd_loss`), utils/losses.py,
ramps.py.
Here both roles have SGD in place of Adam, and the code's twelve passes of a batch through dropout are one. Of a short
batch the squared errors are divided by its own size, in the code by that of a full one.
"""

import autograd.numpy as np
import jax

from tests.official.harness import CLASSES, agree, federation, make_problem, mirrored, train
from tests.official.reference import SGD, classify, gradient, in_float64, log_softmax, softmax, weighted_mean

CLIENTS = [[0, 1, 1, 2, 0, 0, 2, 1, 0], [-1] * 7, [-1] * 4]
CODE = (
    "liuquande/FedIRM@cfe0495: train_main.py, local_supervised.py, local_unsupervised.py, confuse_matrix.py, "
    "FedAvg.py, utils/losses.py, utils/ramps.py"
)
WARM_UP, RAMP, WEIGHT, RELATIVE, DECAY = 1, 6, 3.0, 0.6, 0.7
THRESHOLD, MOST_ENTROPY, EPOCHS = 0.4, 1.05, 2


def confuse_matrix(logits, labels):
    """Rows of softmax(mean logits / 2) of the images of each class, labels [B, C]."""
    means = [np.sum(logits * labels[:, c : c + 1], axis=0) / (np.sum(labels[:, c]) + 1e-8) for c in range(CLASSES)]
    return np.stack([softmax(mean / 2.0) for mean in means])


def kd_loss(source, target):
    """PyTorch's `kl_div` of both directions with 'batchmean', halved."""
    forwards = np.sum(target * (np.log(target) - np.log(source))) / CLASSES
    backwards = np.sum(source * (np.log(source) - np.log(target))) / CLASSES
    return (forwards + backwards) / 2


def test_rounds_of_fedirm(monkeypatch):
    """A round of the client with labels alone, then three of all; images are left out for each of both reasons."""
    monkeypatch.setattr("fedjax_ssl.methods.fedirm.LARGEST_DECAY", DECAY)
    monkeypatch.setattr("fedjax_ssl.methods.fedirm.MOST_ENTROPY", MOST_ENTROPY)
    problem = make_problem("fedirm", **{
        "fedirm.warm_up_rounds": WARM_UP, "fedirm.ramp_epochs": RAMP, "fedirm.weight": WEIGHT,
        "fedirm.relation_weight": RELATIVE, "confidence.threshold": THRESHOLD, "aggregation.weights": "uniform",
        "client.nesterov": False,
    })  # fmt: skip
    run = train(problem, federation(CLIENTS), rounds=WARM_UP + 3, rests=[1])
    images, labels = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels)
    one_hot = np.eye(CLASSES)[np.maximum(labels, 0)]
    sgds = [SGD.of(problem.config.client) for _ in CLIENTS]
    teachers, steps = [None] * 3, [0] * 3
    model, given, seen = in_float64(run.states[0].model), None, {"kept": 0, "unsure": 0, "spread": 0}

    def smoothed(logits, rows):
        log_p = log_softmax(logits)
        return np.mean(0.1 * np.sum(-log_p, axis=1) / CLASSES - 0.9 * np.sum(one_hot[rows] * log_p, axis=1))

    def supervised(job):
        params, statistics, matrices = model["params"], model["batch_stats"], []
        for rows in job.batches(4):
            view = mirrored(images[rows])
            matrices.append(confuse_matrix(classify(params, statistics, view, train=True)[0], one_hot[rows]))

            def loss(params, statistics=statistics, rows=rows, view=view):
                first, statistics = classify(params, statistics, view, train=True)
                second, statistics = classify(params, statistics, view, train=True)
                return smoothed(first, rows) + smoothed(second, rows), statistics

            slope, statistics = gradient(loss, params)
            params = sgds[0].step(params, slope)
        return {"params": params, "batch_stats": statistics}, np.mean(matrices, axis=0)

    def unsupervised(job, number):
        client, params, statistics = job.client, model["params"], model["batch_stats"]
        teachers[client] = teachers[client] or params
        batches = job.batches(4)
        for step, rows in enumerate(batches):
            view, epoch = mirrored(images[rows]), number * EPOCHS + step // (len(batches) // EPOCHS)
            ramp = np.exp(-5 * (1 - min(epoch, RAMP) / RAMP) ** 2)
            target = softmax(classify(teachers[client], statistics, view, train=True)[0])
            p = softmax(classify(params, statistics, view, train=True)[0])
            sure, entropy = p.max(axis=1) >= THRESHOLD, -np.sum(p * np.log(p + 1e-6), axis=1)
            mask = sure & (entropy < MOST_ENTROPY)
            seen["kept"] += sum(mask)
            seen["unsure"] += sum(~sure)
            seen["spread"] += sum(sure & ~mask)
            pseudo = np.eye(CLASSES)[p.argmax(axis=1)] * mask[:, None]

            def loss(params, statistics=statistics, view=view, target=target, pseudo=pseudo, ramp=ramp):
                logits, statistics = classify(params, statistics, view, train=True)
                distance = np.sum((softmax(logits) - target) ** 2) / len(view)
                relations = kd_loss(confuse_matrix(logits, pseudo), given)
                return WEIGHT * ramp * (distance + RELATIVE * relations), statistics

            slope, statistics = gradient(loss, params)
            params = sgds[client].step(params, slope)
            share = min(1 - 1 / (steps[client] + 1), DECAY)
            teachers[client] = jax.tree.map(lambda a, b, s=share: s * a + (1 - s) * b, teachers[client], params)
            steps[client] += 1
        return {"params": params, "batch_stats": statistics}

    for number, (on_labels, without) in enumerate(of_round.jobs for of_round in run.rounds):
        trained, matrix = supervised(next(job for job in on_labels if job.client == 0))
        uploads = [trained]
        if number >= WARM_UP:
            uploads += [unsupervised(job, number) for job in without if job.client > 0]
        else:
            assert all(job.num_steps == 0 for job in without)
        model, given = weighted_mean(uploads, [1] * len(uploads)), matrix
    agree("fedirm", "a warm-up and three rounds", run, model, code=CODE)
    assert np.max(np.abs(np.asarray(run.states[-1].server["relations"]) - given)) < 1e-5
    assert all(seen.values()), seen
