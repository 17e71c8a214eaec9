"""FedCD: two teachers, images weighted by purity and by class awareness balance, in RSCFed's federation without groups.

YunzZ-Liu/FedCD@516245c: local_unsupervised.py (the mean teacher 16-20, a round 60-146, balance 148-252, purity
254-269), local_supervised.py. Its loop over rounds is not public; the mean is by images. The code multiplies [B, C]
errors by [B] weights, which runs only for batches of C images; here each image's errors are first summed over the
classes, as its division by the sum of weights over images asks. Nor does it load the received model into the student;
here the student starts from it, as in RSCFed's code.
"""

import autograd.numpy as np
import jax

from tests.official.harness import agree, federation, make_problem, mirrored, train
from tests.official.reference import (
    SGD,
    backbone,
    cross_entropy,
    gradient,
    in_float64,
    linear,
    log_softmax,
    softmax,
    weighted_mean,
)

CLIENTS = [[0, 1, 1, 2, 0, 0, 2, 1, 0], [-1] * 6, [-1] * 7]
CODE = "YunzZ-Liu/FedCD@516245c: local_unsupervised.py, local_supervised.py"
OF_GLOBAL, OF_LOCAL, CONFIDENT, DECAY = 1.5, 2.5, 0.2, 0.7


def outputs(params, statistics, images, train):
    features, new = backbone(params["backbone"], statistics["backbone"], images, train)
    return features, linear(params["classifier"], features), {**statistics, "backbone": new}


def weights_of(logits):
    """get_confi_classes, find_unreliable_samples and get_weights, without the factors that cancel in the loss."""
    bank = np.sum(softmax(logits), axis=0)
    scaled = (bank - bank.min()) / (bank.max() - bank.min())
    confident, count = np.where(scaled >= CONFIDENT)[0], len(logits)
    ranks = np.argsort(np.argsort(-logits, axis=1), axis=1)
    unreliable = np.array([any(1 <= rank[label] <= 1 for label in confident) for rank in ranks])
    number = unreliable.sum()
    if number in (0, count):
        return np.ones(count), unreliable
    return np.where(unreliable, count / number, count / (count - number)), unreliable


def test_rounds_of_fedcd(monkeypatch):
    monkeypatch.setattr("fedjax_ssl.client.mean_teacher.LARGEST_DECAY", DECAY)
    problem = make_problem("fedcd,code", **{
        "fedcd.global_weight": OF_GLOBAL, "fedcd.local_weight": OF_LOCAL, "fedcd.confident": CONFIDENT,
        "fedcd.first_rank": 1, "fedcd.last_rank": 1,
        "client.nesterov": False, "client.clip_norm": 0.5, "client.unlabelled_learning_rate": 0.04,
    })  # fmt: skip
    run = train(problem, federation(CLIENTS), rounds=4)
    images, labels = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels)
    rates = (0.05, 0.04, 0.04)
    own = [{"sgd": SGD.of(problem.config.client, rate), "steps": 0, "teacher": None} for rate in rates]
    model, marked = in_float64(run.states[0].model), []

    def teach(own, student):
        share = min(1 - 1 / (own["steps"] + 1), DECAY)
        average = jax.tree.map(lambda a, b: share * a + (1 - share) * b, own["teacher"]["params"], student)
        own.update(teacher={**own["teacher"], "params": average}, steps=own["steps"] + 1)

    def train_client(received, job):
        client, (params, statistics) = own[job.client], (received["params"], received["batch_stats"])
        client["teacher"] = client["teacher"] or received
        rows = np.asarray(run.data.client_index[job.client, : len(CLIENTS[job.client])])
        found, unreliable = weights_of(outputs(params, statistics, mirrored(images[rows]), train=False)[1])
        weight_of = dict(zip(rows, found))
        marked.extend(unreliable if job.client else [])
        for batch in job.batches(4):
            views = mirrored(images[batch])
            lessons = [
                (factor, *outputs(teacher["params"], teacher["batch_stats"], views, train=False)[:2])
                for factor, teacher in ((OF_GLOBAL, received), (OF_LOCAL, client["teacher"]))
            ]

            def loss(params, statistics=statistics, batch=batch, views=views, lessons=lessons):
                features, logits, statistics = outputs(params, statistics, views, train=True)
                if job.client == 0:
                    return np.mean(cross_entropy(logits, labels[batch])), statistics
                value, weights = 0.0, np.array([weight_of[row] for row in batch])
                for factor, taught, scores in lessons:
                    sharp = softmax(scores) ** 2
                    target = sharp / np.sum(sharp, axis=1, keepdims=True)
                    apart = np.sum(softmax(taught) * (log_softmax(taught) - log_softmax(features)), axis=1)
                    errors = np.sum((softmax(logits) - target) ** 2, axis=1)
                    value = value + factor * np.sum(weights * np.exp(-apart) * errors) / np.sum(weights)
                return value, statistics

            slope, statistics = gradient(loss, params)
            params = client["sgd"].step(params, slope)
            if job.client > 0:
                teach(client, params)
        return {"params": params, "batch_stats": statistics}

    for of_round in run.rounds:
        jobs = [on_labels if on_labels.client == 0 else other for on_labels, other in zip(*of_round.jobs)]
        models = [train_client(model, job) for job in jobs]
        model = weighted_mean(models, [len(CLIENTS[job.client]) for job in jobs])
    agree("fedcd", "four rounds", run, model, code=CODE)
    assert 0.1 < np.mean(marked) < 0.9
