"""Twin-sight by its code's two loops, for clients with labels and clients without.

tmlr-group/Twin-sight@974798a: model/SemiFed.py, trainers/normal_trainer.py:241-437 and 560-606, ssl_model/ssl_utils.py,
algorithms_standalone/basePS/strategies.py. Each client has one optimizer for the whole run. Both networks see the weak
and the strong views of a batch as one batch. FreeMatch's averages start again in each round, but in the last case.
"""

import autograd.numpy as np
import jax
import pytest

from tests.helpers.linear_network import divided
from tests.helpers.trainers_by_hand import FixMatch, FreeMatch
from tests.official.harness import CLASSES, agree, federation, make_problem, mirrored, rolled, train
from tests.official.reference import (
    SGD,
    backbone,
    classify,
    cross_entropy,
    detached,
    fairness,
    gradient,
    in_float64,
    linear,
    log_softmax,
    projector,
    softmax,
    unit,
    weighted_mean,
)

CLIENTS = [[0, 1, 2, 2, 0, 1, 1, 2, 0, 1, 0], [-1] * 7, [-1] * 8]  # no batch of two: 2 ^ 2 is 0
FIELDS = {
    "data.labelled_clients": 1, "client.nesterov": False, "client.epochs": 1, "client.learning_rate": 0.01,
    "model.projector_hidden": 6, "model.projector_dim": 4, "confidence.threshold": 0.5,
}  # fmt: skip
FREEMATCH = {
    "twin_sight.pseudo_weight": 0.5, "confidence.momentum": 0.6,
    "confidence.clamp_least": 0.35, "confidence.clamp_most": 0.45,
}  # fmt: skip
CASES = {
    "paper, FixMatch": ("twin_sight,paper", {"client.epochs": 2}),
    "code": ("twin_sight,paper,code", {}),
    "code, FreeMatch": ("twin_sight,paper,code,freematch", FREEMATCH),
}
SLOW = list(CASES)
# Images of both kinds at the third client, which trains on one after the other; and what its code does not have.
MIXED, MORE = [*CLIENTS[:2], [1, -1, 0, -1, -1, 2, -1, 0]], "both kinds of images, FreeMatch's term, no prior"
CASES[MORE] = ("twin_sight,paper,code,freematch", {
    **FREEMATCH, "confidence.memory": "run", "confidence.fairness_weight": 0.3, "confidence.debias": "app_u",
    "client.labelled_views": "both",
})  # fmt: skip


def instance_loss(z, temperature):
    """Cross-entropy of each view's other view among all views but itself."""
    z, size = unit(z), len(z) // 2
    similar = z @ z.T / temperature - 1e9 * np.eye(len(z))
    return -np.mean(log_softmax(similar)[np.arange(len(z)), np.roll(np.arange(len(z)), size)])


def gram(features):
    return unit(features) @ unit(features).T


def rule_of(options, freematch):
    """FreeMatch has the code's bounds for SVHN."""
    if freematch:
        return FreeMatch(CLASSES, options.momentum, (options.clamp_least, options.clamp_most))
    return FixMatch(options.threshold)


@pytest.mark.parametrize("case", [*(pytest.param(case, marks=pytest.mark.slow) for case in SLOW), MORE])
def test_rounds_of_twin_sight(case):
    arguments, fields = CASES[case]
    problem = make_problem(arguments, **{**FIELDS, **fields})
    clients = MIXED if case == MORE else CLIENTS
    run = train(problem, federation(clients), rounds=3)
    options, config = problem.config.twin_sight, problem.config.client
    images, labels = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels)
    optimisers, rules = [SGD.of(config) for _ in clients], {}
    model, accepted = in_float64(run.states[0].model), []

    def both(params, statistics, rows):
        """The pass of both networks: L_i and L_n in their sum, the logits of both views, all statistics."""
        joined, size = np.concatenate([mirrored(images[rows]), rolled(images[rows])]), len(rows)
        twin = statistics["twin"]
        features, of_twin = backbone(params["twin"]["backbone"], twin["backbone"], joined, train=True)
        z, of_projector = projector(params["twin"]["projector"], twin["projector"], features, train=True)
        of_model, own = backbone(params["backbone"], statistics["backbone"], joined, train=True)
        divisor = size ^ 2 if options.replica else size**2
        near = np.sum((gram(features[:size]) - gram(of_model[:size])) ** 2) / divisor
        value = 0.5 * instance_loss(z, 0.07) + near
        after = {"backbone": own, "twin": {"backbone": of_twin, "projector": of_projector}}
        return value, linear(params["classifier"], of_model), after

    def prior_of(client):
        rows = np.asarray(run.data.client_index)[client, : len(clients[client])]
        views = mirrored(images[rows[labels[rows] < 0]])
        return np.mean(softmax(classify(model["params"], model["batch_stats"], views, train=False)[0]), axis=0)

    def train_on(job, start, sgd, on_labels):
        params, statistics = start["params"], start["batch_stats"]
        rule = rule_of(problem.config.confidence, "freematch" in arguments)
        if case == MORE:
            rule = rules.setdefault(job.client, rule)
        prior = None if on_labels or case != MORE else prior_of(job.client)
        for rows in job.batches(config.batch_size):

            def loss(params, statistics=statistics, rows=rows, start=params):
                value, logits, after = both(params, statistics, rows)
                size = len(rows)
                if on_labels:
                    trained, times = (logits, 2) if case == MORE else (logits[:size], 1)
                    value = value + np.mean(cross_entropy(trained, np.tile(labels[rows], times)))
                elif options.pseudo_weight:
                    now = both(start, statistics, rows)[1]
                    weak, strong = now[:size], logits[size:]
                    if options.labels_from == "strong":  # the code exchanges them
                        weak, strong = now[size:], logits[:size]
                    p = softmax(weak) if prior is None else divided(softmax(weak), prior)
                    chosen = rule.weigh(p, rows)
                    accepted.extend(chosen)
                    value = value + 0.5 * np.mean(cross_entropy(strong, p.argmax(axis=1)) * chosen)
                    if case == MORE:
                        value = value + 0.5 * 0.3 * fairness(rule, strong, detached(strong).argmax(axis=1), chosen)
                return value, after

            slope, statistics = gradient(loss, params)
            if not on_labels and not options.pseudo_weight:
                del slope["classifier"]  # no loss reaches it
            params = sgd.step(params, slope)
        return {"params": params, "batch_stats": statistics}

    for of_round in run.rounds:
        uploads, sizes = [], []
        for labelled, unlabelled in zip(*of_round.jobs):
            upload, sgd = model, optimisers[labelled.client]
            for job, on_labels in ((labelled, True), (unlabelled, False)):
                upload = train_on(job, upload, sgd, on_labels) if job.num_steps else upload
            uploads.append(upload)
            sizes.append(len(clients[labelled.client]))
        model = weighted_mean(uploads, sizes)
    if options.pseudo_weight:
        assert 0 < np.mean(accepted) < 1
    code = "tmlr-group/Twin-sight@974798a: model/SemiFed.py, trainers/normal_trainer.py"
    agree("twin_sight", case, run, jax.tree.map(np.asarray, model), code=code)
