"""The server's training: orders of its epochs, keys of its steps, and the rates of pre-training and of rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.engine.interface import State
from fedjax_ssl.server.training import (
    SERVER_MODEL,
    ServerPlan,
    pretrained_classifier,
    train_classifier,
    train_on_server_labels,
    train_server_model,
)
from tests.helpers.linear_network import at_rest, in_numpy, sgd_step
from tests.helpers.small_problem import (
    SmallNetwork,
    assert_model,
    federation,
    itself,
    loss_and_gradient,
    pixels_of,
    sent_down,
    small_problem,
    statistics_of,
)

LABELS = [0, 1, 2, 2, 0, 1, 1]


@pytest.fixture(scope="module")
def data():
    return federation([[-1]], at_server=LABELS)


def test_each_epoch_has_an_order_and_each_step_a_key_of_its_own(data):
    problem, batches, keys = small_problem("supervised"), [], set()

    def note(rows, mask, key):
        batches.append(rows[mask].tolist())
        keys.add(tuple(key.tolist()))

    def loss(model, rows, labels, mask, key):
        jax.debug.callback(note, rows, mask, jax.random.key_data(key))
        step = model.batch_stats["mean"] + 1  # statistics that count the steps
        return jnp.sum(model.params["classifier"]["kernel"]), ({"mean": step}, {"step": step[0]})

    model = sent_down(problem).model._replace(batch_stats={"mean": np.zeros(4, np.float32)})
    state, plan = State(jnp.int32(0), model), ServerPlan(loss, 4, batch_size=3)
    run = jax.jit(lambda *given: train_on_server_labels(problem, *given, 0.1, plan))
    _, metrics = jax.block_until_ready(run(state, data, jax.random.key(0)))
    jax.effects_barrier()
    assert len(keys) == len(batches) == 12 and metrics["step"] == (10 + 11 + 12) / 3  # the mean of the last epoch
    orders = [tuple(np.concatenate(batches[first : first + 3]).tolist()) for first in range(0, 12, 3)]
    assert all(sorted(order) == [*range(7)] for order in orders) and len(set(orders)) == 4


def test_a_server_without_labels_trains_nothing():
    problem = small_problem("supervised")
    state = State(jnp.int32(0), sent_down(problem).model)
    assert train_classifier(problem, state, federation([[0, 1]]), jax.random.key(0)) == (state, {})


@pytest.mark.parametrize("lasts", [False, True])
def test_rates_and_momentum_of_pretraining_and_rounds(data, lasts):
    """Epochs of one step. Pre-training has a rate of its own, rounds follow the schedule; momentum may go on."""
    fields = {"momentum": 0.5, "weight_decay": 0.0, "clip_norm": 0.0, "epochs": 2, "pretrain_epochs": 1,
              "pretrain_learning_rate": 0.25, "learning_rate": 0.5, "persistent": lasts,
              "pretrain_persistent": lasts}  # fmt: skip
    fields = {f"server.{name}": value for name, value in fields.items()} | {"schedule": "cosine", "num_rounds": 8}
    problem, key = small_problem("supervised", weak=itself, strong=itself, **fields), jax.random.key(0)
    model, x = in_numpy(problem.network.init(jax.random.split(key)[0]).params), pixels_of(data, range(7))
    velocity, state, metrics = at_rest(model), pretrained_classifier(problem, data, key), {}
    trainings = [(0.25, 1), *((0.25 * (1 + np.cos(np.pi * number / 8)), 2) for number in (0, 1, 2))]
    for number, (rate, steps) in enumerate(trainings):
        if number:
            state, metrics = train_classifier(problem, state, data, key)
            state = state._replace(round=state.round + 1)
        velocity = velocity if lasts else at_rest(model)
        for _ in range(steps):
            loss, gradient = loss_and_gradient(model, x, x.mean(axis=0), np.eye(3)[LABELS] / 7)
            model, velocity = sgd_step(model, gradient, velocity, problem.config.server, rate)
        assert_model(state.model, model)
        assert not number or metrics["server_loss"] == pytest.approx(loss, rel=1e-4)  # of the last epoch


def test_a_model_of_the_server_s_own_has_the_statistics_of_its_images(data):
    """Under 'static', after its training; the global model stays."""
    network = SmallNetwork(normalisation="static")
    network.gathered = None
    network.batch_statistics = lambda model, images, mask: {
        "mean": model.params["backbone"]["bias"][0]
        + jnp.mean(images.reshape(len(images), -1) / 255, axis=0, where=mask[:, None])
    }
    problem = small_problem("fedil", network, **{"model.statistics": "all", "server.epochs": 1})
    state = State(jnp.int32(0), sent_down(problem).model)
    after, _ = train_server_model(problem, state, data, jax.random.key(0))
    found = after.server[SERVER_MODEL]
    bias, before = (model.params["backbone"]["bias"][0] for model in (found, state.model))
    np.testing.assert_allclose(statistics_of(found), bias + pixels_of(data, range(7)).mean(axis=0), atol=1e-5)
    assert after.model is state.model and abs(bias - before) > 1e-3
