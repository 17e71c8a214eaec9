"""The server's training: orders of its epochs, keys of its steps, and the rates of pre-training and of rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.engine.interface import CLASSIFIER, State
from fedjax_ssl.server.training import pretrained_classifier, train_classifier, train_on_server_labels
from tests.helpers.linear_network import in_numpy
from tests.helpers.small_problem import (
    assert_model,
    federation,
    itself,
    loss_and_gradient,
    pixels_of,
    sent_down,
    small_problem,
)

LABELS = [0, 1, 2, 2, 0, 1, 1]


@pytest.fixture(scope="module")
def data():
    return federation([[-1]], at_server=LABELS)


def test_each_epoch_has_an_order_and_each_step_a_key_of_its_own(data):
    problem, batches, keys = small_problem("supervised"), [], set()

    def loss(model, rows, labels, mask, key):
        batches.append(np.asarray(rows)[np.asarray(mask)].tolist())
        keys.add(tuple(np.asarray(jax.random.key_data(key)).tolist()))
        return jnp.sum(model.params["classifier"]["kernel"]), (model.batch_stats, {})

    state, how = State(jnp.int32(0), sent_down(problem).model), {"parts": CLASSIFIER, "epochs": 4, "batch_size": 3}
    with jax.disable_jit():  # a loop in Python, whose rows and keys are numbers
        train_on_server_labels(state, data, loss, problem.config.server, 0.1, jax.random.key(0), **how)
    assert len(keys) == len(batches) == 12
    orders = [tuple(np.concatenate(batches[first : first + 3]).tolist()) for first in range(0, 12, 3)]
    assert all(sorted(order) == [*range(7)] for order in orders) and len(set(orders)) == 4


def test_a_server_without_labels_trains_nothing():
    problem = small_problem("supervised")
    state = State(jnp.int32(0), sent_down(problem).model)
    assert train_classifier(problem, state, federation([[0, 1]]), jax.random.key(0)) == (state, {})


def test_pretraining_and_rounds_have_a_rate_each(data):
    """An epoch of one plain step."""
    plain = {"momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.0, "epochs": 1, "pretrain_epochs": 1}
    rates = {"pretrain_learning_rate": 0.25, "learning_rate": 0.5}
    fields = {f"server.{name}": value for name, value in {**plain, **rates}.items()}
    problem, key = small_problem("supervised", weak=itself, strong=itself, **fields), jax.random.key(0)
    first = problem.network.init(jax.random.split(key)[0])
    pretrained = pretrained_classifier(problem, data, key)
    trained, _ = train_classifier(problem, pretrained, data, key)
    x = pixels_of(data, range(7))
    for before, after, rate in (first, pretrained.model, 0.25), (pretrained.model, trained.model, 0.5):
        model = in_numpy(before.params)
        gradient = loss_and_gradient(model, x, x.mean(axis=0), np.eye(3)[LABELS] / 7)[1]
        assert_model(after, {name: leaf - rate * gradient[name] for name, leaf in model.items()})
