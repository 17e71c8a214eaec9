"""Twin-sight by its code's two loops, for clients with labels and clients without.

tmlr-group/Twin-sight@974798a: model/SemiFed.py, trainers/normal_trainer.py:241-437 and 560-606, ssl_model/ssl_utils.py,
algorithms_standalone/basePS/strategies.py. Each client has one optimizer for the whole run. Both networks see the weak
and the strong views of a batch as one batch. FreeMatch's averages start again in each round.
"""

import autograd.numpy as np
import jax
import pytest

from tests.official.harness import CLASSES, agree, federation, make_problem, mirrored, rolled, rule_options, train
from tests.official.reference import (
    SGD,
    backbone,
    cross_entropy,
    gradient,
    in_float64,
    linear,
    log_softmax,
    projector,
    softmax,
    weighted_mean,
)

LABELLED = 0
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
SLOW = ("paper, FixMatch", "code")


def unit(x):
    """Rows scaled to length 1. The code would make NaN of a row of zeros, which such a small network may give."""
    squares = np.sum(x**2, axis=1, keepdims=True)
    return x / np.sqrt(np.where(squares > 0, squares, 1.0))


def instance_loss(z, temperature):
    """Cross-entropy of each view's other view among all views but itself."""
    z, size = unit(z), len(z) // 2
    similar = z @ z.T / temperature - 1e9 * np.eye(len(z))
    return -np.mean(log_softmax(similar)[np.arange(len(z)), np.roll(np.arange(len(z)), size)])


def gram(features):
    return unit(features) @ unit(features).T


class FixMatch:
    def __init__(self, options):
        self.threshold = options.threshold

    def accept(self, p):
        return p.max(axis=1) >= self.threshold


class FreeMatch:
    """Thresholds of classes within the code's bounds for SVHN; without the fairness term."""

    def __init__(self, options):
        self.momentum, self.bounds = options.momentum, (options.clamp_least, options.clamp_most)
        self.level, self.by_class = 1 / CLASSES, np.full(CLASSES, 1 / CLASSES)

    def accept(self, p):
        best = p.max(axis=1)
        self.level = self.momentum * self.level + (1 - self.momentum) * best.mean()
        self.by_class = self.momentum * self.by_class + (1 - self.momentum) * p.mean(axis=0)
        needed = self.level * (self.by_class / self.by_class.max())[p.argmax(axis=1)]
        return best >= np.clip(needed, *self.bounds)


@pytest.mark.parametrize("case", [*(pytest.param(case, marks=pytest.mark.slow) for case in SLOW), "code, FreeMatch"])
def test_rounds_of_twin_sight(case):
    arguments, fields = CASES[case]
    problem = make_problem(arguments, **{**FIELDS, **fields})
    run = train(problem, federation(CLIENTS), rounds=3)
    options, config = problem.config.twin_sight, problem.config.client
    images, labels = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels)
    optimisers = [SGD.of(config) for _ in CLIENTS]
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

    def train_client(job, sgd):
        params, statistics = model["params"], model["batch_stats"]
        rule = (FreeMatch if "freematch" in arguments else FixMatch)(rule_options(problem))
        for rows in job.batches(config.batch_size):

            def loss(params, statistics=statistics, rows=rows, start=params):
                value, logits, after = both(params, statistics, rows)
                size = len(rows)
                if job.client == LABELLED:
                    value = value + np.mean(cross_entropy(logits[:size], labels[rows]))
                elif options.pseudo_weight:
                    now = both(start, statistics, rows)[1]
                    weak, strong = now[:size], logits[size:]
                    if options.labels_from == "strong":  # the code exchanges them
                        weak, strong = now[size:], logits[:size]
                    p = softmax(weak)
                    chosen = rule.accept(p)
                    accepted.extend(chosen)
                    value = value + 0.5 * np.mean(cross_entropy(strong, p.argmax(axis=1)) * chosen)
                return value, after

            slope, statistics = gradient(loss, params)
            if job.client != LABELLED and not options.pseudo_weight:
                del slope["classifier"]  # no loss reaches it
            params = sgd.step(params, slope)
        return {"params": params, "batch_stats": statistics}

    for of_round in run.rounds:
        uploads, sizes = [], []
        for labelled, unlabelled in zip(*of_round.jobs):
            job = labelled if labelled.client == LABELLED else unlabelled
            uploads.append(train_client(job, optimisers[job.client]))
            sizes.append(len(CLIENTS[job.client]))
        model = weighted_mean(uploads, sizes)
    if options.pseudo_weight:
        assert 0 < np.mean(accepted) < 1
    code = "tmlr-group/Twin-sight@974798a: model/SemiFed.py, trainers/normal_trainer.py"
    agree("twin_sight", case, run, jax.tree.map(np.asarray, model), code=code)
