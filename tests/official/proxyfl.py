"""ProxyFL by its code (DuowenC/FSSLlib@f732a27: ProxyFL/proxyfl.py:60-150, 170-190, 262-425), and by its paper.

GPT at the server on the clients' classifier rows in the run's order, ICPL at clients with the code's or the paper's
candidates and negatives, and the prior: in the code a moving average of pooled counts, in the paper the clients' mean.
The code's optimizer passes its momentum from client to client; the library starts without momentum.
"""

import autograd.numpy as np
import jax
import numpy
import pytest

from fedjax_ssl.methods import proxyfl
from tests.official.consistency import CLIENTS, train_client, weak_logits
from tests.official.harness import agree, federation, make_problem, train
from tests.official.reference import gradient, in_float64, linear, log_softmax, softmax, unit, weighted_mean
from tests.official.sage import FIELDS

THRESHOLD, EPOCHS, POINTS, RATE = 0.5, 3, 4, 0.02


@pytest.mark.parametrize("variant", ["proxyfl", pytest.param("proxyfl,code", marks=pytest.mark.slow)])
def test_rounds_of_proxyfl(variant, monkeypatch):
    fields = {"confidence.threshold": THRESHOLD, "proxyfl.tuning_epochs": EPOCHS,
              "model.classifier_init": "torch_linear"}  # fmt: skip
    for name, value in {"BATCH_SIZE": POINTS, "LEARNING_RATE": RATE, "PRIOR_MOMENTUM": 0.6}.items():
        monkeypatch.setattr(proxyfl, name, value)
    orders = []

    def noted(*arguments):
        drawn = epoch_orders(*arguments)
        jax.debug.callback(lambda order: orders.append(numpy.array(order)), drawn)
        return drawn

    epoch_orders = proxyfl.epoch_orders
    monkeypatch.setattr(proxyfl, "epoch_orders", noted)
    as_code = variant == "proxyfl,code"
    problem = make_problem(variant, **{**fields, **FIELDS})
    run = train(problem, federation(CLIENTS), rounds=3)
    model, prior = in_float64(run.states[0].model), np.full(3, 1 / 3)

    for of_round, of_points in zip(run.rounds, orders, strict=True):
        (jobs,) = of_round.jobs
        uploads, counts = [], []
        for job in jobs:
            loss, told = loss_of_client(prior, job.num_steps // 2, as_code)
            uploads.append(train_client(run, model, job, loss, unlabelled_size=4))
            counts.append(told)
        model = weighted_mean(uploads, [len(CLIENTS[job.client]) for job in jobs])
        rows = np.concatenate([upload["params"]["classifier"]["kernel"].T for upload in uploads])
        model["params"]["classifier"]["kernel"] = tuned(model["params"]["classifier"]["kernel"].T, rows, of_points).T
        if as_code:
            prior = 0.6 * prior + 0.4 * np.sum(counts, axis=0) / np.sum(counts)
        else:
            prior = np.mean([of_client / of_client.sum() for of_client in counts], axis=0)
    assert np.max(np.abs(np.array(run.states[-1].server["prior"]) - prior)) < 1e-6
    code = "DuowenC/FSSLlib@f732a27: ProxyFL/proxyfl.py:60-150, 170-190, 262-425"
    agree("proxyfl", "its code" if as_code else "its paper", run, model, code=code)


def tuned(average, rows, orders):
    """The global rows [C, F] after plain SGD on the clients' rows [M C, F], client by client."""
    labels = np.tile(np.arange(len(average)), len(rows) // len(average))
    between = np.linalg.norm(average[:, None] - average[None], axis=2) + np.diag(np.full(len(average), np.inf))
    margin = min(np.max(np.min(between, axis=1)), 100)
    for order in orders:
        for first in range(0, len(rows), POINTS):
            points = order[first : first + POINTS]

            def loss(omega, x=rows[points], y=labels[points]):
                distance = np.sqrt(np.sum((x[:, None] - omega[None]) ** 2, axis=2)) + margin * np.eye(len(omega))[y]
                return np.mean(-log_softmax(-distance)[np.arange(len(y)), y]), None

            average = average - RATE * gradient(loss, average)[0]
    return average


def loss_of_client(prior, steps_of_epoch, as_code):
    """The loss that a client adds to the labelled images' cross-entropy, and counts that its last epoch fills."""
    told = np.zeros(len(prior))

    def loss(step):
        p, of_known = softmax(step.received), softmax(step.labelled_received)
        local, sure = softmax(weak_logits(step)), np.max(p, axis=1) >= THRESHOLD
        if as_code:
            sure = sure | (np.max(local, axis=1) >= THRESHOLD)
        labels, one_hot = np.argmax(p, axis=1), np.eye(len(prior))
        targets = one_hot[labels] + 1e-10
        divergence = np.sum(targets * (np.log(targets) - np.log(softmax(step.strong[0]) + 1e-10)), axis=1)
        if step.index >= steps_of_epoch:
            told[:] += np.bincount(step.labels, minlength=3) + np.bincount(labels[sure], minlength=3)

        heads = step.params["feature_projection"], step.params["proxy_projection"]
        features = np.concatenate([view[1] for view in (step.labelled, step.weak, step.strong)])
        z, v = unit(linear(heads[0], features)), unit(linear(heads[1], step.params["classifier"]["kernel"].T))
        every_p, likelihood = np.concatenate([of_known, p, p]), np.concatenate([of_known, local, local])
        every_sure = np.concatenate([np.max(of_known, axis=1) >= THRESHOLD, sure, sure])
        likely, best = every_p > prior, np.argmax(every_p, axis=1)
        to_best = np.sum(z * v[best], axis=1)
        to_likely = np.sum(z * (((every_p if as_code else likelihood) * likely) @ v), axis=1)
        drawn_to = np.where(every_sure, to_best, to_likely)
        candidates = np.where(every_sure[:, None], one_hot[best] > 0, likely)
        if not as_code:
            candidates = np.concatenate([one_hot[step.labels] > 0, candidates[len(of_known) :]])
        alike = z @ z.T
        apart = (candidates.astype(float) @ candidates.T.astype(float) == 0) & ((alike >= 1e-6) | (not as_code))
        logits = np.concatenate([drawn_to[:, None], np.where(apart, alike, -1e9)], axis=1)[len(of_known) :]
        losses, both = -log_softmax(logits)[:, 0], np.concatenate([sure, sure])
        if as_code:
            return np.mean(divergence * sure) + np.mean(losses)
        of_each = [np.mean(losses[group]) for group in (both, ~both) if group.any()]
        return np.sum(divergence * sure) / max(np.sum(sure), 1) + sum(of_each)

    return loss, told
