"""FedCon: BYOL at clients with their own projector and target, two views and a ramp at the server.

zewei-long/fedcon-pytorch@54732ec: fedcon-main.py:268-365 (order of a round, transmitted parts, the server's loss),
models/byol.py:115-181 (both networks, which one is read, the moving averages), optimizers/lars_simclr.py:46-75 (a
velocity that is read but never stored). The comparison starts at the first round's clients: the server's training
before them is the library's pre-training. As in docs/methods/fedcon.md, a client keeps its parts under its own number
and uses the round's rate, and the server's network sees each view once; the code passes it twice, and so updates
running statistics twice. Short batches, which the code leaves out, are trained.
"""

import itertools

import autograd.numpy as np
import jax
import pytest
from numpy.testing import assert_allclose

from fedjax_ssl.methods.fedcon import PROJECTOR, STUDENT, VARIANTS
from tests.official.harness import agree, federation, make_problem, mirrored, rolled, train
from tests.official.reference import (
    SGD,
    backbone,
    classify,
    cross_entropy,
    detached,
    gradient,
    in_float64,
    linear,
    log_softmax,
    normalise,
    relu,
    softmax,
    weighted_mean,
)

CLIENTS, ANCHORS = [[-1] * 12, [-1] * 4, [-1] * 7], [0, 1, 2, 2, 1, 0, 1]
CODE = "zewei-long/fedcon-pytorch@54732ec: fedcon-main.py, models/byol.py, optimizers/lars_simclr.py"
RATE, DECAY, TRUST, TARGET_DECAY, SPEED, RAMP, CONSISTENCY, ROUNDS = 0.3, 0.01, 0.1, 0.7, 0.3, 3, 0.7, 4
FIELDS = {
    "clients_per_round": 2, "aggregation.weights": "uniform", "client.epochs": 1, "client.learning_rate": RATE,
    "client.optimizer": "lars",
    "client.weight_decay": DECAY, "client.nesterov": False, "client.clip_norm": 0.0, "server.clip_norm": 0.0,
    "server.epochs": 2, "server.pretrain_epochs": 0, "server.momentum": 0.5, "server.nesterov": False,
    "server.weight_decay": 0.0, "fedcon.consistency_weight": CONSISTENCY,
    "schedule": "cosine", "num_rounds": ROUNDS,
}  # fmt: skip


class LARS:
    """Layer-wise rates: matrices decay and move by a share of their length, vectors by the plain gradient."""

    def __init__(self, rate, momentum):
        self.rate, self.momentum, self.velocity = rate, momentum, None

    def step(self, params, slope):
        def scaled(p, g):
            if p.ndim < 2:
                return self.rate * g
            g = g + DECAY * p
            return self.rate * TRUST * np.linalg.norm(p) / np.linalg.norm(g) * g

        change = jax.tree.map(scaled, params, slope)
        if self.momentum and self.velocity is not None:
            change = jax.tree.map(lambda c, v: c + self.momentum * v, change, self.velocity)
        self.velocity = change
        return jax.tree.map(np.subtract, params, change)


def project(params, x):
    unused = {"mean": 0, "var": 0}
    x, _ = normalise(params["norm"], unused, linear(params["first"], x), train=True)
    return linear(params["second"], relu(x))


def cosine_loss(p, z):
    """-mean cos(p, z); features z that are all 0 count 0."""
    product = np.sum(p**2, axis=1) * np.sum(z**2, axis=1)
    return -np.mean(np.sum(p * z, axis=1) / np.sqrt(np.where(product > 0, product, 1)))


def divergence(of, logits):
    """KL(of, softmax of logits), averaged over the batch; `of` are logits without gradient."""
    return np.mean(np.sum(softmax(of) * (log_softmax(of) - log_softmax(logits)), axis=1))


def averaged(old, new, share):
    return jax.tree.map(lambda a, b: share * a + (1 - share) * b, old, new)


@pytest.mark.parametrize("variant", ["repaired", pytest.param("code", marks=pytest.mark.slow)])
def test_rounds_of_fedcon(variant, monkeypatch):
    monkeypatch.setattr("fedjax_ssl.ops.sgd.TRUST", TRUST)
    for name, value in (("TARGET_DECAY", TARGET_DECAY), ("RAMP_ROUNDS", RAMP), ("STUDENT_SPEED", SPEED)):
        monkeypatch.setattr(f"fedjax_ssl.methods.fedcon.{name}", value)
    as_code, views = variant == "code", itertools.cycle((mirrored, rolled))  # each step of this method calls two views
    momentum = VARIANTS["code"]["client.momentum"] if as_code else 0.9
    fields = {**FIELDS, "client.momentum": momentum}
    problem = make_problem("fedcon,code" if as_code else "fedcon", weak=lambda images: next(views)(images), **fields)
    run = train(problem, federation(CLIENTS, ANCHORS), rounds=ROUNDS)
    images, labels, config = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels), problem.config
    model = in_float64(run.states[0].model)
    params, statistics = model["params"], model["batch_stats"]
    first = jax.tree.map(lambda leaf: np.array(leaf, np.float64), run.states[0].clients[PROJECTOR])
    projectors = [jax.tree.map(lambda leaf, k=k: leaf[k], first) for k in range(3)]
    targets, student, visits = [None] * 3, params, [0] * 3

    def train_client(client, batches, factor):
        own = {"backbone": params["backbone"], "projector": projectors[client]}
        target, seen = targets[client] or params["backbone"], statistics["backbone"]
        lars = LARS(RATE * factor, 0.0 if as_code else 0.9)
        for rows in batches:
            x = mirrored(images[rows]), rolled(images[rows])
            z = [backbone(target, statistics["backbone"], view, train=True)[0] for view in x]

            def loss(own, seen=seen, x=x, z=z):
                one, seen = backbone(own["backbone"], seen, x[0], train=True)
                two, seen = backbone(own["backbone"], seen, x[1], train=True)
                one, two = project(own["projector"], one), project(own["projector"], two)
                return cosine_loss(one, z[1]) / 2 + cosine_loss(two, z[0]) / 2, seen

            slope, seen = gradient(loss, own)
            own = lars.step(own, slope)
            target = averaged(target, own["backbone"], TARGET_DECAY)
        projectors[client], targets[client] = own["projector"], target
        visits[client] += 1
        return own["backbone"], seen

    for number, of_round in enumerate(run.rounds):
        (jobs,) = of_round.jobs
        factor = (1 + np.cos(np.pi * number / ROUNDS)) / 2
        uploads = [train_client(job.client, job.batches(4), factor) for job in jobs]
        found, seen = weighted_mean(uploads, [1] * len(uploads))
        params, statistics = {**params, "backbone": found}, {"backbone": seen}
        t, sgd = number + 1, SGD.of(config.server, config.server.learning_rate * factor)
        student = student if as_code else params
        ramp, losses = np.exp(-5 * (1 - min(t, RAMP) / RAMP) ** 2) * CONSISTENCY, []
        at_server = [rows for _, rows in of_round.seen if np.all(rows < len(ANCHORS))][::2]
        for step, rows in enumerate(at_server):
            rows = rows[: len(ANCHORS) - step % 2 * 4]  # padding follows
            x, y = (mirrored(images[rows]), rolled(images[rows])), labels[rows]
            other = [classify(student, statistics, view, train=True)[0] for view in x]

            def loss(params, statistics=statistics, x=x, y=y, other=other, ramp=ramp):
                one, statistics = classify(params, statistics, x[0], train=True)
                two, statistics = classify(params, statistics, x[1], train=True)
                from_one, from_two = map(detached, (one, two)) if as_code else other
                value = np.mean(cross_entropy(one, y)) / 2 + np.mean(cross_entropy(two, y)) / 2
                apart = (divergence(from_two, one) + divergence(from_one, two)) / 2
                return value + ramp * apart, (statistics, value, apart)

            k = 1000 * t + step
            student = averaged(student, params, 1 - SPEED * (np.cos(np.pi * k / 20000) + 1) / 2)
            slope, (statistics, *values) = gradient(loss, params)
            params = sgd.step(params, slope)
            losses.append(values)
        found = [run.metrics[number][name] for name in ("server_loss", "server_consistency")]
        assert_allclose(found, np.mean(losses[-2:], axis=0), rtol=1e-4)  # of the last epoch
    assert min(visits) > 0 and max(visits) > 2, "nobody came again"
    what = "its code, no momentum" if as_code else "its student read and renewed, momentum"
    model = {"params": params, "batch_stats": statistics}
    agree("fedcon", what, run, model, code=CODE)
    if as_code:
        kept = run.states[-1].server[STUDENT]
        differences = jax.tree.map(lambda a, b: np.max(np.abs(a - b)), dict(kept), student)
        assert max(jax.tree.leaves(differences)) <= 1e-5
