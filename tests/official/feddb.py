"""FedDB (GuogangZhu/FedDB@9f9248e: src/main.py, src/modules/modules.py), without normalisation.

The code normalises by the batch also at inference. The library has no such policy, so nothing is normalised here.
"""

import autograd.numpy as np
import jax
from autograd import grad

from tests.official.alternate import Mean
from tests.official.harness import agree, federation, make_problem, mirrored, rolled, train
from tests.official.reference import SGD, classify, cross_entropy, gradient, in_float64, softmax

CLIENTS = [[0, 1, -1, -1, 2, -1, -1, 1, -1], [1, 1, 0, -1, -1, -1, -1, -1, 2, -1, 0], [2, -1, -1, -1, 0]]
FIELDS = {
    "confidence.threshold": 0.53, "client.batch_size": 2, "client.persistent": True, "client.clip_norm": 1.0,
    "aggregation.optimizer": "fedavgm", "model.normalisation": "none",
}  # fmt: skip


def server_weights(priors):
    """Weights of the models, [M], that make the weighted mean of the priors [M, C] uniform."""
    uniform = np.full(priors.shape[1], 1 / priors.shape[1])
    weights = np.full(len(priors), 1 / len(priors))
    for _ in range(100):
        slope = grad(lambda a: np.mean((np.dot(a, priors) - uniform) ** 2))(weights) + 0.9 * weights
        weights = softmax(weights - (slope + 0.9 * slope))  # Nesterov's first step
    return weights


def test_rounds_of_feddb():
    problem = make_problem("feddb", **FIELDS)
    run = train(problem, federation(CLIENTS), rounds=4)
    config, images, labels = problem.config.client, np.asarray(run.data.inputs), np.asarray(run.data.visible_labels)
    optimisers, server = [SGD.of(config) for _ in CLIENTS], Mean(0.5)
    params, cases, moved_weights = in_float64(run.states[0].model)["params"], set(), []

    def logits(params, views):
        return classify(params, {}, views, train=True)[0]

    def train_client(job, params):
        rows = np.asarray(run.data.client_index)[job.client][: len(CLIENTS[job.client])]
        p = softmax(logits(params, mirrored(images[rows])))
        prior = p.mean(axis=0)
        p = p / prior / np.sum(p / prior, axis=1, keepdims=True)
        chosen = p.max(axis=1) >= problem.config.confidence.threshold
        known, sgd = rows[labels[rows] >= 0], optimisers[job.client]
        cases.add(bool(chosen.any()))

        def loss_on(rows, labels, view):
            return lambda params: np.mean(cross_entropy(logits(params, view(images[rows])), labels))

        if not chosen.any():
            for batch in job.batches(config.batch_size):
                loss = loss_on(batch, labels[batch], mirrored)
                params = sgd.step(params, gradient(lambda p, loss=loss: (loss(p), None), params)[0])
            return params, prior
        sure, pseudo = rows[chosen], p.argmax(axis=1)[chosen]
        first, second = loss_on(known, labels[known], mirrored), loss_on(sure, pseudo, rolled)
        assert job.num_steps == config.epochs
        for _ in range(config.epochs):
            prior = 0.5 * prior + 0.5 * softmax(logits(params, mirrored(images[sure]))).mean(axis=0)
            params = sgd.step(params, gradient(lambda p: (first(p) + second(p), None), params)[0])
        return params, prior

    for of_round in run.rounds:
        (jobs,) = of_round.jobs
        uploads, priors = zip(*(train_client(job, params) for job in jobs))
        weights = server_weights(np.array(priors))
        moved_weights.append(np.ptp(weights))
        params = server.step(params, list(uploads), weights)
    assert cases == {True, False}
    assert 1e-4 < max(moved_weights) < 0.05  # the code's solver hardly moves them
    model = {"params": jax.tree.map(np.asarray, params)}
    agree("feddb", "four rounds", run, model, code="GuogangZhu/FedDB@9f9248e: src/main.py, modules/modules.py")
