"""FedOpenMatch against NumPy: labels that its one-vs-all head accepts in the report, and the server's loss.

tests/official/fedopenmatch.py has whole rounds with labels at clients.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.client import Examples
from fedjax_ssl.engine import Cohort, Labels, Report
from fedjax_ssl.methods import METHODS, fedopenmatch
from fedjax_ssl.methods.fedopenmatch import ONE_VS_ALL, labels_of_inliers, server_loss
from tests.helpers.linear_network import in_numpy
from tests.helpers.small_problem import (
    CLASSES,
    SmallNetwork,
    federation,
    loss_and_gradient,
    negative,
    pixels_of,
    sent_down,
    small_problem,
    statistics_of,
)

LEAST = 0.6


def test_labels_that_the_head_rejects_do_not_count(monkeypatch):
    data = federation([[0, -1, -1, 2, 1, -1, -1, -1, -1]])
    network = SmallNetwork(ONE_VS_ALL, head_dim=CLASSES)
    problem = small_problem("fedopenmatch", network, **{"fedopenmatch.inlier": LEAST})
    labels = np.arange(10)[None] % CLASSES

    def confident(received, data, cohort, previous):
        examples = Examples.of(data, cohort)
        return Labels(Report(jnp.asarray(labels), examples.present.at[0, 1].set(False)))

    received = sent_down(problem)
    monkeypatch.setattr(fedopenmatch, "labels_of_received", lambda *_: confident)
    cohort = Cohort(jnp.array([0]), {}, jax.random.key(4))
    made = labels_of_inliers(problem, None)(received, data, cohort, None)
    model, rows = received.model, np.asarray(data.client_index)[0, :9]
    kernel, bias = np.asarray(model.params[ONE_VS_ALL]["kernel"]), model.params["backbone"]["bias"]
    z = (pixels_of(data, rows) - statistics_of(model)) @ kernel + 0.1 * np.sum(bias)
    accepted = 1 / (1 + np.exp(-z[np.arange(9), labels[0, :9]])) >= LEAST
    accepted |= np.asarray(data.visible_labels)[rows] >= 0  # visible labels count whatever the head says
    accepted[1] = False  # it was not confident
    assert 3 < accepted.sum() < 8
    np.testing.assert_array_equal(made.report.qualified[0], [*accepted, False])


def test_the_server_s_loss_is_of_both_classifiers():
    data = federation([[-1]], at_server=[0, 2, 1, 1])
    problem = small_problem("fedopenmatch", SmallNetwork(ONE_VS_ALL, head_dim=CLASSES))
    model, rows = sent_down(problem).model, data.server_index
    mask = jnp.array([True, True, True, False])
    loss_fn = server_loss(problem, data)
    loss, (_, metrics) = loss_fn(model, rows, data.visible_labels[rows], mask, jax.random.key(0))
    x, y = pixels_of(data, rows[:3], negative), np.eye(CLASSES)[[0, 2, 1]]
    expected = loss_and_gradient(in_numpy(model.params), x, x.mean(axis=0), y / 3)[0]
    z = (x - x.mean(axis=0)) @ np.asarray(model.params[ONE_VS_ALL]["kernel"], np.float64)
    of_head = np.mean(np.log1p(np.exp(-z[y == 1])) + np.max((1 - y) * np.log1p(np.exp(z)), axis=1))
    found = [metrics["server_loss"], metrics["server_one_vs_all_loss"], loss]
    np.testing.assert_allclose(found, [expected, of_head, expected + of_head], rtol=1e-5)


def test_the_server_trains_the_head_before_the_first_round_and_in_each():
    data = federation([[-1]], at_server=[0, 2, 1, 1])
    fields = {"server.pretrain_epochs": 1, "server.epochs": 1, "server.weight_decay": 0.0}
    problem = small_problem("fedopenmatch", SmallNetwork(ONE_VS_ALL, head_dim=CLASSES), **fields)
    method, key = METHODS["fedopenmatch"].factory(problem), jax.random.key(0)
    first = method.init(data, key)
    after, _ = method.server_after(first, data, key)
    fresh = problem.network.init(jax.random.split(key)[0])
    kernels = [np.asarray(model.params[ONE_VS_ALL]["kernel"]) for model in (fresh, first.model, after.model)]
    assert np.all(kernels[0] != kernels[1]) and np.all(kernels[1] != kernels[2])
