"""RSCFed: groups that train in turns, mean teachers, means weighted by the distance to a group's mean.

xmed-lab/RSCFed@ae35f03: train_main.py:215-345 with `--un_dist=avg`, as in the README of 4872944 (the mean from which
distances are taken then lacks the labelled client's factor), local_unsupervised.py, local_supervised.py, FedAvg.py.
Distances here exclude PyTorch's batch counters.
"""

import autograd.numpy as np
import jax
import pytest

from tests.official.harness import agree, federation, make_problem, mirrored, train
from tests.official.reference import SGD, classify, cross_entropy, gradient, in_float64, softmax, weighted_mean

CLIENTS = [[0, 1, 1, 2, 0, 0, 2, 1, 0], [-1] * 6, [-1] * 7]
CODE = "xmed-lab/RSCFed@ae35f03: train_main.py, local_unsupervised.py, local_supervised.py, FedAvg.py"
FACTOR, BETA, BETA_LABELLED, DECAY = 6.0, 6.0, 3.0, 0.7


@pytest.mark.parametrize(("variant", "statistics_from"), [
    ("rscfed", "received"), pytest.param("rscfed,code", "first", marks=pytest.mark.slow),
])  # fmt: skip
def test_rounds_of_rscfed(variant, statistics_from, monkeypatch):
    """Two groups of two clients: one client is in both, so its optimizer and teacher advance twice in a round."""
    monkeypatch.setattr("fedjax_ssl.client.mean_teacher.LARGEST_DECAY", DECAY)
    problem = make_problem(variant, **{
        "rscfed.teacher_statistics": statistics_from,
        "rscfed.groups": 2, "rscfed.group_size": 2, "rscfed.labelled_factor": FACTOR, "rscfed.beta": BETA,
        "rscfed.beta_labelled": BETA_LABELLED, "rscfed.consistency_weight": 0.8,
        "client.nesterov": False, "client.clip_norm": 0.5, "client.unlabelled_learning_rate": 0.04,
    })  # fmt: skip
    run = train(problem, federation(CLIENTS), rounds=4)
    images, labels = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels)
    rates, sizes = (0.05, 0.04, 0.04), [len(client) for client in CLIENTS]
    own = [{"sgd": SGD.of(problem.config.client, rate), "steps": 0, "teacher": None} for rate in rates]
    model, twice, with_labels, shares = in_float64(run.states[0].model), 0, set(), []

    def teach(own, student):
        share = min(1 - 1 / (own["steps"] + 1), DECAY)
        average = jax.tree.map(lambda a, b: share * a + (1 - share) * b, own["teacher"]["params"], student)
        own.update(teacher={**own["teacher"], "params": average}, steps=own["steps"] + 1)

    def train_client(received, job):
        client, (params, statistics) = own[job.client], (received["params"], received["batch_stats"])
        client["teacher"] = client["teacher"] or received
        if statistics_from == "received":
            client["teacher"] = {**client["teacher"], "batch_stats": statistics}
        for rows in job.batches(4):
            views = mirrored(images[rows])
            teacher = client["teacher"]
            logits, _ = classify(teacher["params"], teacher["batch_stats"], views, train=False)
            sharp = softmax(logits) ** 2
            target = sharp / np.sum(sharp, axis=1, keepdims=True)

            def loss(params, statistics=statistics, rows=rows, views=views, target=target):
                logits, statistics = classify(params, statistics, views, train=True)
                if job.client == 0:
                    return np.mean(cross_entropy(logits, labels[rows])), statistics
                size = 4 if variant == "rscfed,code" else len(rows)
                return 0.8 * np.sum((softmax(logits) - target) ** 2) / size, statistics

            slope, statistics = gradient(loss, params)
            params = client["sgd"].step(params, slope)
            if job.client > 0:
                teach(client, params)
        return {"params": params, "batch_stats": statistics}

    def consensus(clients, models):
        counts = [sizes[client] for client in clients]
        mean = weighted_mean(models, counts)
        distances = [
            sum(np.sqrt(np.sum((a - b) ** 2)) for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(mean)))
            for model in models
        ]
        scale = BETA_LABELLED if 0 in clients else BETA
        weights = [np.exp(-d * scale / n) * n / sum(counts) for d, n in zip(distances, counts)]
        weights = [weight * (FACTOR if client == 0 else 1) for client, weight in zip(clients, weights)]
        shares.append(np.array(weights) / sum(weights))
        return weighted_mean(models, weights)

    for of_round in run.rounds:
        drawn = [job.client for job in of_round.jobs[0]]
        twice += len(set(drawn)) < 4 and sum(drawn.count(client) > 1 for client in (1, 2))
        jobs = [on_labels if on_labels.client == 0 else other for on_labels, other in zip(*of_round.jobs)]
        groups = [jobs[:2], jobs[2:]]
        with_labels |= {0 in [job.client for job in group] for group in groups}
        model = weighted_mean(
            [consensus([job.client for job in group], [train_client(model, job) for job in group]) for group in groups],
            [1, 1],
        )
    what = "four rounds of two groups" if variant == "rscfed,code" else "means over the images, received statistics"
    agree("rscfed", what, run, model, code=CODE)
    assert twice and with_labels == {True, False}
    assert all(np.min(share) > 0.05 for share in shares), shares
