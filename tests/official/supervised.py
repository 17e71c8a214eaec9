"""FedAvg and FedProx with a few labels at every client: cross-entropy on weakly augmented labelled images.

FedAvg has no single official code. FedProx's (litian96/FedProx@d2a4501, flearn/optimizer/pgd.py) adds mu (w - w_t) to
the gradient; here the loss has a term with the same gradient.
"""

import autograd.numpy as np
import jax
import pytest

from tests.official.harness import agree, federation, make_problem, mirrored, train
from tests.official.reference import SGD, classify, cross_entropy, in_float64, trained, weighted_mean

CLIENTS = [[0, 1, -1, 2, 0, -1, 1, 2, 2], [2, -1, 0, 1], [1, 1, 0, -1, 2, -1, 0]]


# FedProx's steps are those of FedAvg and a term.
FEDAVG = pytest.param("supervised", 0.0, marks=pytest.mark.slow)


@pytest.mark.parametrize(("variant", "mu"), [FEDAVG, ("supervised,fedprox", 0.3)])
def test_rounds_of_fedavg(variant, mu):
    problem = make_problem(variant, **{"data.labels": "clients", "client.proximal": mu, "client.clip_norm": 2.0})
    run = train(problem, federation(CLIENTS), rounds=2)
    images, labels = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels)
    model = in_float64(run.states[0].model)

    def train_client(job):
        def loss(params, statistics, batch):
            logits, statistics = classify(params, statistics, mirrored(images[batch]), train=True)
            term = sum(np.sum((a - b) ** 2) for a, b in zip(*map(jax.tree.leaves, (params, model["params"]))))
            return np.mean(cross_entropy(logits, labels[batch])) + mu / 2 * term, statistics

        return trained(model, SGD.of(problem.config.client), job.batches(problem.config.client.batch_size), loss)

    for of_round in run.rounds:
        (jobs,) = of_round.jobs
        sizes = [len(CLIENTS[job.client]) for job in jobs]
        model = weighted_mean([train_client(job) for job in jobs], sizes)
    code = "litian96/FedProx@d2a4501: flearn/optimizer/pgd.py" if mu else "no code: by the paper's algorithm 1"
    agree("supervised", "FedProx" if mu else "FedAvg", run, model, code=code)
