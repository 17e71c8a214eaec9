"""FedDure (White1973/FedDure@50ecb77: groups/client_ssl/base_ssl.py:696-806, 891-983), and its F-reg by hand.

The released class has no F-reg. In the second case the reference writes its gradient by the chain rule, first a slope
for each image and then through the weights; the library differentiates a look-ahead step.
"""

import functools

import autograd.numpy as np
import jax
import pytest
from autograd import grad

from tests.official.harness import agree, federation, make_problem, mirrored, rolled, train
from tests.official.reference import (
    SGD,
    classify,
    cross_entropy,
    gradient,
    in_float64,
    log_softmax,
    relu,
    softmax,
    weighted_mean,
)

CLIENTS = [[0, 1, -1, -1, 2, -1, -1, 1, -1], [1, 1, 0, -1, -1, -1, -1, -1, 2, -1, 0], [-1] * 6]
FIELDS = {
    "confidence.threshold": 0.45, "feddure.tuning_steps": 3, "feddure.steps": 4, "feddure.unlabelled_batch": 4,
    "client.batch_size": 3,
}  # fmt: skip
ADAM = {
    "client.optimizer": "adam", "client.nesterov": False, "client.weight_decay": 0.0, "client.clip_norm": 0.0,
    "client.learning_rate": 0.01, "feddure.warm_up_steps": 10, "feddure.wait_steps": 2,
}  # fmt: skip
CASES = {
    "its code": ("feddure,code", ADAM),
    "with the fine regulator": ("feddure", {"client.learning_rate": 0.1}),
}
NO_EFFECT = "without the learning effect"
FINE_RATE = 0.05


class Adam:
    """PyTorch's Adam, with a learning-rate factor for each step."""

    def __init__(self, rate, factor=lambda step: 1.0):
        self.rate, self.factor, self.count, self.moments = rate, factor, 0, None

    def step(self, params, slope):
        zeros = jax.tree.map(np.zeros_like, slope)
        mean, square = self.moments or (zeros, zeros)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, slope)
        square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, square, slope)
        rate, self.count, self.moments = self.rate * self.factor(self.count), self.count + 1, (mean, square)
        by_mean, by_square = 1 - 0.9**self.count, 1 - 0.999**self.count
        return jax.tree.map(
            lambda p, m, v: p - rate * (m / by_mean) / (np.sqrt(v / by_square) + 1e-8), params, mean, square
        )


def weights_of(regulator, p):
    hidden = relu(p @ regulator["w1"] + regulator["b1"])
    return 1 / (1 + np.exp(-(hidden @ regulator["w2"] + regulator["b2"])))


FINE = pytest.param("with the fine regulator", marks=pytest.mark.test_all)


@pytest.mark.parametrize("case", ["its code", FINE, pytest.param(NO_EFFECT, marks=pytest.mark.slow)])
def test_rounds_of_feddure(case, monkeypatch):
    monkeypatch.setattr("fedjax_ssl.methods.feddure.pair.HIDDEN", 5)
    monkeypatch.setattr("fedjax_ssl.methods.feddure.pair.FINE_RATE", FINE_RATE)
    arguments, fields = CASES.get(case, ("feddure,no_coarse", {"client.learning_rate": 0.1}))
    problem = make_problem(arguments, **{**FIELDS, **fields})
    run = train(problem, federation(CLIENTS), rounds=3)
    options, config = problem.config.feddure, problem.config.client
    images, labels = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels)
    model, confident = in_float64(run.states[0].model), []
    nothing = model["batch_stats"]  # a forward pass in training reads no statistics

    def optimiser(wait):
        rise = options.warm_up_steps + wait
        if config.optimizer == "adam":
            return Adam(config.learning_rate, lambda step: 0.0 if step < wait else step / rise)
        return SGD.of(config)

    def mean_loss(params, views, targets):
        if not len(views):
            return 0.0
        return np.mean(cross_entropy(classify(params, nothing, views, train=True)[0], targets))

    def slope_of(loss, params):
        return gradient(lambda p: (loss(p), None), params)[0]

    def regulated(regulator, local, x, y, weak, pseudo, p, adam):
        """F-reg after its step, by the chain rule."""

        def one(i):
            return lambda q: cross_entropy(classify(q, nothing, weak, train=True)[0], pseudo)[i]

        slopes = [slope_of(one(i), local) for i in range(len(weak))]
        weights = weights_of(regulator, p)
        shares = weights / weights.sum()
        ahead = local
        for share, slope in zip(shares, slopes):
            ahead = jax.tree.map(lambda q, g, share=share: q - config.learning_rate * share * g, ahead, slope)
        if not len(x):
            return regulator
        up = slope_of(lambda q: mean_loss(q, x, y), ahead)
        along = [sum(np.sum(a * b) for a, b in zip(jax.tree.leaves(up), jax.tree.leaves(s))) for s in slopes]
        gains = -config.learning_rate * np.array(along)

        def of_regulator(w1, b1, w2, b2):
            weights = weights_of({"w1": w1, "b1": b1, "w2": w2, "b2": b2}, p)
            return np.sum(weights * gains) / np.sum(weights)

        names = ("w1", "b1", "w2", "b2")
        slope = grad(of_regulator, argnum=(0, 1, 2, 3))(*(regulator[name] for name in names))
        return adam.step(regulator, dict(zip(names, slope)))

    def loss(statistics, joined, y, bs, p, weights, hard, effect, q):
        z, after = classify(q, statistics, joined, train=True)
        strong, value = z[bs + len(p) :], np.mean(cross_entropy(z[:bs], y)) if bs else 0.0
        value = value + np.mean(-np.sum(p * log_softmax(strong), axis=1) * weights)
        return value + options.coarse * effect * np.mean(cross_entropy(strong, hard)), after

    def train_client(job):
        params, statistics = model["params"], model["batch_stats"]
        local, coarse, of_local = params, optimiser(0), optimiser(options.wait_steps)
        regulator = jax.tree.map(lambda leaf: np.array(leaf, np.float64), job.work.work)
        of_regulator = Adam(FINE_RATE)
        known = job.batches(config.batch_size, job.work.decks["labelled"])
        others = job.batches(options.unlabelled_batch, job.work.decks["unlabelled"])
        for number in range(options.tuning_steps + options.steps):
            rows = known[number % len(known)] if known else np.zeros(0, int)
            unlabelled = others[number % len(others)]
            x, y, weak = mirrored(images[rows]), labels[rows], mirrored(images[unlabelled])
            strong = rolled(images[unlabelled])
            step, bs, size = number - options.tuning_steps, len(rows), len(unlabelled)
            joined = np.concatenate([x, weak, strong])
            logits = classify(params, statistics, joined, train=True)[0]
            p = softmax(logits[bs : bs + size])
            pseudo, sure = p.argmax(axis=1), p.max(axis=1) >= problem.config.confidence.threshold
            hard, effect = logits[bs + size :].argmax(axis=1), 0.0
            if step >= 0:
                confident.extend(sure)
                weights = np.full(size, 1 / size)
                if options.fine:
                    regulator = regulated(regulator, local, x, y, weak, pseudo, p, of_regulator)
                    weights = weights_of(regulator, p) / weights_of(regulator, p).sum()

                def taught(q, weak=weak, pseudo=pseudo, weights=weights):
                    return np.sum(weights * cross_entropy(classify(q, nothing, weak, train=True)[0], pseudo))

                before = mean_loss(local, x, y)
                local = of_local.step(local, slope_of(taught, local))
                effect = mean_loss(local, x, y) - before
            elif not bs:
                continue  # the library's rule: the code has no client without labels

            rise = 8 * min(1.0, (step + 1) / 20) if step >= 0 else 0.0
            of_step = (joined, y, bs, p, rise * sure, hard, effect)
            slope, statistics = gradient(functools.partial(loss, statistics, *of_step), params)
            params = coarse.step(params, slope)
        return {"params": params, "batch_stats": statistics}

    for of_round in run.rounds:
        (jobs,) = of_round.jobs
        model = weighted_mean([train_client(job) for job in jobs], [len(CLIENTS[job.client]) for job in jobs])
    assert 0 < np.mean(confident) < 1
    code = "White1973/FedDure@50ecb77: groups/client_ssl/base_ssl.py"
    if options.fine:
        code = f"no code: of the fine regulator; else {code}"
    agree("feddure", case, run, jax.tree.map(np.asarray, model), code=code)
