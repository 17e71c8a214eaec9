"""FedOpenMatch against NumPy: labels that its one-vs-all head accepts; a client's steps and the server's loss."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.client import Examples
from fedjax_ssl.engine import Cohort, Labels, Report
from fedjax_ssl.methods import METHODS, fedopenmatch
from fedjax_ssl.methods.fedopenmatch import ONE_VS_ALL, labels_of_inliers, server_loss
from tests.helpers.consistency_by_hand import batches
from tests.helpers.linear_heads import gradient_of
from tests.helpers.linear_network import at_rest, in_numpy, sgd_step
from tests.helpers.small_problem import (
    CLASSES,
    SmallNetwork,
    assert_model,
    federation,
    loss_and_gradient,
    mirrored,
    negative,
    phases_of,
    pixels_of,
    probabilities,
    running_mean,
    sent_down,
    small_problem,
    statistics_of,
    train,
)

LEAST = 0.6


def test_labels_that_the_head_rejects_do_not_count(monkeypatch):
    data = federation([[0, -1, -1, 2, 1, -1, -1, -1, -1]])
    problem = small_problem(
        "fedopenmatch", SmallNetwork(ONE_VS_ALL, head_dim=CLASSES), **{"fedopenmatch.inlier": LEAST}
    )
    labels = np.arange(10)[None] % CLASSES

    def confident(received, data, cohort, previous):
        examples = Examples.of(data, cohort)
        return Labels(Report(jnp.asarray(labels), examples.present.at[0, 1].set(False)))

    received = sent_down(problem)
    monkeypatch.setattr(fedopenmatch, "labels_of_received", lambda *_: confident)
    cohort = Cohort(jnp.array([0]), {}, jax.random.key(4))
    made = labels_of_inliers(problem, None)(received, data, cohort, None)
    model, rows = received.model, np.asarray(data.client_index)[0, :9]
    kernel, bias = (
        np.asarray(model.params[part][name]) for part, name in ((ONE_VS_ALL, "kernel"), ("backbone", "bias"))
    )
    z = (pixels_of(data, rows) - statistics_of(model)) @ kernel + 0.1 * bias.sum()
    accepted = 1 / (1 + np.exp(-z[np.arange(9), labels[0, :9]])) >= LEAST
    accepted |= np.asarray(data.visible_labels)[rows] >= 0  # visible labels count whatever the head says
    accepted[1] = False  # it was not confident
    assert 3 < accepted.sum() < 8
    np.testing.assert_array_equal(made.report.qualified[0], [*accepted, False])


def test_steps_are_those_of_the_equations():
    """The classifier's losses as FixMatch's, but of labels that the head accepts; the head's; none moves the other."""
    data = federation([[0, -1, -1, 2, 1, -1, -1, -1, -1, 1]])
    options = {"inlier": LEAST, "entropy_weight": 0.4, "consistency_weight": 0.7}
    fields = {f"fedopenmatch.{name}": value for name, value in options.items()}
    fields |= {"data.labels": "clients", "confidence.threshold": 0.5}
    problem = small_problem("fedopenmatch", SmallNetwork(ONE_VS_ALL, head_dim=CLASSES), **fields)
    received, config = sent_down(problem), problem.config.client
    job, finished = train(phases_of(METHODS["fedopenmatch"].factory(problem))[0], received, data, 0)

    rows = np.asarray(data.client_index)[0, :10]
    labels, statistics = np.asarray(data.visible_labels)[rows], statistics_of(received.model)
    head = np.asarray(received.model.params[ONE_VS_ALL]["kernel"], np.float64)
    model, refused, values = {**in_numpy(received.model.params), "head": head}, 0, []
    velocity = at_rest(model)
    labelled = batches(np.asarray(job.work.decks["labelled"].order), 4, config.batch_size)
    for known, unknown in zip(labelled, batches(np.asarray(job.work.decks["unlabelled"].order), 6, config.batch_size)):
        given = pixels_of(data, rows[known], mirrored)
        weak, strong = (pixels_of(data, rows[unknown], view) for view in (mirrored, negative))
        views, n, y = np.concatenate([given, weak, strong]), len(unknown), np.eye(CLASSES)[labels[known]]
        centre = views.mean(axis=0)

        def of_head(model, given=given, weak=weak, strong=strong, y=y, centre=centre):
            z, z_weak, z_strong = ((x - centre) @ model["head"] for x in (given, weak, strong))
            right, wrong = np.log1p(np.exp(-z)), np.log1p(np.exp(z))  # -log s, -log(1 - s)
            value = np.mean(np.sum(y * right, axis=1) + np.max((1 - y) * wrong, axis=1))
            s = 1 / (1 + np.exp(-np.concatenate([z_weak, z_strong])))
            entropy = -np.mean(s * np.log(s) + (1 - s) * np.log(1 - s))
            return value + 0.4 * entropy + 0.7 * np.mean((z_weak - z_strong) ** 2)

        p = probabilities(model, weak, centre)
        pseudo, sure = np.eye(CLASSES)[p.argmax(axis=1)], p.max(axis=1) >= 0.5
        z = np.sum(pseudo * ((weak - centre) @ model["head"]), axis=1) + 0.1 * model["bias"].sum()  # the network's
        inlier = 1 / (1 + np.exp(-z)) >= LEAST
        refused += np.sum(sure & ~inlier)
        targets = np.concatenate([y / len(y), (sure & inlier)[:, None] * pseudo / n])
        slope = loss_and_gradient(model, np.concatenate([given, strong]), centre, targets)[1]
        values.append(of_head(model))
        gradient = {**slope, "head": gradient_of(of_head, {"head": model["head"]})["head"]}
        model, velocity = sgd_step(model, gradient, velocity, config, config.learning_rate)
        statistics = running_mean(statistics, views)
    assert refused and finished.metrics["confident_share"] > 0
    np.testing.assert_allclose(finished.upload.model.params[ONE_VS_ALL]["kernel"], model["head"], atol=1e-5)
    assert_model(finished.upload.model, model, statistics)
    np.testing.assert_allclose(finished.metrics["one_vs_all_loss"], np.mean(values), rtol=1e-5)


def test_the_server_s_loss_is_of_both_classifiers():
    data = federation([[-1]], at_server=[0, 2, 1, 1])
    problem = small_problem("fedopenmatch", SmallNetwork(ONE_VS_ALL, head_dim=CLASSES))
    model, rows = sent_down(problem).model, data.server_index
    mask = jnp.array([True, True, True, False])
    loss_fn = server_loss(problem, data, "strong")
    loss, (_, metrics) = loss_fn(model, rows, data.visible_labels[rows], mask, jax.random.key(0))
    x, y = pixels_of(data, rows[:3], negative), np.eye(CLASSES)[[0, 2, 1]]
    expected = loss_and_gradient(in_numpy(model.params), x, x.mean(axis=0), y / 3)[0]
    z = (x - x.mean(axis=0)) @ np.asarray(model.params[ONE_VS_ALL]["kernel"], np.float64)
    of_head = np.mean(np.log1p(np.exp(-z[y == 1])) + np.max((1 - y) * np.log1p(np.exp(z)), axis=1))
    found = [metrics["server_loss"], metrics["server_one_vs_all_loss"], loss]
    np.testing.assert_allclose(found, [expected, of_head, expected + of_head], rtol=1e-5)


def test_the_server_trains_the_head_before_the_first_round_and_in_each():
    """A step of plain SGD on all of its images."""
    data, y = federation([[-1]], at_server=[0, 2, 1, 1]), np.eye(CLASSES)[[0, 2, 1, 1]]
    fields = {"learning_rate": 0.3, "pretrain_learning_rate": 0.3, "pretrain_epochs": 1, "epochs": 1, "batch_size": 4}
    fields |= {"weight_decay": 0.0, "momentum": 0.0, "nesterov": False, "clip_norm": 0.0, "augmentation": "strong"}
    problem = small_problem("fedopenmatch", SmallNetwork(ONE_VS_ALL, head_dim=CLASSES),
                            **{f"server.{name}": value for name, value in fields.items()})  # fmt: skip
    method, key = METHODS["fedopenmatch"].factory(problem), jax.random.key(0)
    first = method.init(data, key)
    x = pixels_of(data, data.server_index, negative)

    def of_head(model):
        z = (x - x.mean(axis=0)) @ model["head"]
        return np.mean(np.log1p(np.exp(-z[y == 1])) + np.max((1 - y) * np.log1p(np.exp(z)), axis=1))

    after, _ = method.server_after(first, data, key)
    for pair in ((problem.network.init(jax.random.split(key)[0]), first.model), (first.model, after.model)):
        old, new = (np.asarray(model.params[ONE_VS_ALL]["kernel"], np.float64) for model in pair)
        np.testing.assert_allclose(new, old - 0.3 * gradient_of(of_head, {"head": old})["head"], atol=1e-5)
