"""Fed-Consist: no code of it is public, so this is the baseline by the equation of docs/methods/fed_consist.md.

Cross-entropy at the client with labels, the squared error of two views' predictions at the others, and the mean by the
number of images. liuquande/FedIRM@cfe0495 has the same squared error (utils/losses.py: softmax_mse_loss), towards a
mean teacher: see tests/official/fedirm.py.
"""

import itertools

import autograd.numpy as np

from fedjax_ssl.methods import fed_consist
from tests.official.harness import agree, federation, make_problem, mirrored, rolled, train
from tests.official.reference import SGD, classify, cross_entropy, gradient, in_float64, softmax, weighted_mean

CLIENTS = [[0, 1, 1, 2, 0, 0, 2, 1, 0], [-1] * 6, [-1] * 7]
CODE = "no code: by its equation; the squared error as in liuquande/FedIRM@cfe0495: utils/losses.py"
WEIGHT = 0.8


def test_rounds_of_fed_consist(monkeypatch):
    """Views draw nothing, so the two of a step are made different: the first mirrors images, the second rolls them."""
    views = itertools.cycle([mirrored, rolled])  # each trace of the loss takes both
    of_problem = fed_consist.consistency
    with_two = lambda problem: of_problem(problem._replace(weak=lambda key, images: next(views)(images)))  # noqa: E731
    monkeypatch.setattr(fed_consist, "consistency", with_two)
    problem = make_problem("fed_consist", **{"fed_consist.consistency_weight": WEIGHT, "fed_consist.warm_up_rounds": 1})
    run = train(problem, federation(CLIENTS), rounds=4, rests=[1])
    images, labels = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels)
    model, errors = in_float64(run.states[0].model), []

    def trained(job, model):
        sgd = SGD.of(problem.config.client)
        params, statistics = model["params"], model["batch_stats"]
        for rows in job.batches(4):
            target = softmax(classify(params, statistics, rolled(images[rows]), train=True)[0])

            def loss(params, statistics=statistics, rows=rows, target=target):
                logits, statistics = classify(params, statistics, mirrored(images[rows]), train=True)
                if job.client == 0:
                    return np.mean(cross_entropy(logits, labels[rows])), statistics
                _, statistics = classify(params, statistics, rolled(images[rows]), train=True)
                squares = np.mean(np.sum((softmax(logits) - target) ** 2, axis=1))
                return WEIGHT * squares, statistics

            slope, statistics = gradient(loss, params)
            params = sgd.step(params, slope)
            errors.append(np.max(np.abs(slope["classifier"]["kernel"])))
        return {"params": params, "batch_stats": statistics}

    for of_round in run.rounds:
        jobs = [first if first.client == 0 else second for first, second in zip(*of_round.jobs)]
        jobs = [job for job in jobs if job.num_steps]  # in the first round only the client with labels
        model = weighted_mean([trained(job, model) for job in jobs], [len(CLIENTS[job.client]) for job in jobs])
    agree("fed_consist", "a warm-up and three rounds", run, model, code=CODE)
    assert min(errors) > 1e-3, "a step without a gradient"
