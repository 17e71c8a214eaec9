"""Rounds under the recipe `strong` against NumPy: the schedule, Nesterov, clipping, and what survives a round."""

import jax
import numpy as np

from fedjax_ssl.engine.round import init_key, make_round
from fedjax_ssl.methods import METHODS
from tests.helpers.linear_network import at_rest, in_numpy, sgd_step
from tests.helpers.small_problem import (
    CLASSES,
    SmallNetwork,
    assert_model,
    federation,
    itself,
    loss_and_gradient,
    pixels_of,
    small_problem,
)

ROUNDS, CLIENTS, SIZE, ANCHORS = 4, 4, 6, 5


def test_rounds_under_the_recipe_strong():
    """Clients and server of FedAvg on given labels: SGD of each with a velocity of its own, kept for its next turn."""
    rng = np.random.default_rng(0)
    # Every batch is a whole data set, so that no order matters; nothing is augmented.
    fields = {
        "num_rounds": ROUNDS, "num_clients": CLIENTS, "clients_per_round": 3, "model.normalisation": "group",
        "client.batch_size": SIZE, "client.epochs": 2, "client.learning_rate": 0.5, "client.clip_norm": 0.1,
        "server.batch_size": ANCHORS, "server.epochs": 2, "server.learning_rate": 0.3, "server.clip_norm": 0.1,
        "server.pretrain_epochs": 0, "client.momentum": 0.9,
    }  # fmt: skip
    network = SmallNetwork(normalisation="group")  # the recipe's statistics are test_statistics.py's
    problem = small_problem("supervised,strong", network, weak=itself, strong=itself, **fields)
    config, method = problem.config, METHODS["supervised"].factory(problem)
    data = federation(rng.integers(0, CLASSES, (CLIENTS, SIZE)).tolist(), at_server=[0, 1, 2, 0, 1])
    round_fn = jax.jit(make_round(problem, method, lanes=1))
    state = method.init(data, init_key(data.seed))

    one_hot = np.eye(CLASSES)[np.asarray(data.visible_labels)]
    model = in_numpy(state.model.params)
    server_velocity, momentum = at_rest(model), at_rest(model)
    velocities, cohorts = [at_rest(model) for _ in range(CLIENTS)], []

    def train(model, velocity, section, rows, number):
        rate, x = section.learning_rate * (1 + np.cos(np.pi * number / ROUNDS)) / 2, pixels_of(data, rows)
        for _ in range(section.epochs):
            gradient = loss_and_gradient(model, x, x.mean(axis=0), one_hot[rows] / len(rows))[1]
            model, velocity = sgd_step(model, gradient, velocity, section, rate)
        return model, velocity

    for number in range(ROUNDS):
        before = velocities_of(state)
        state, _ = round_fn(state, data, data.visible_labels)
        cohort = np.flatnonzero(np.any(before != velocities_of(state), axis=1))
        cohorts.append(set(cohort.tolist()))
        uploads = []
        for client in cohort:
            rows = np.asarray(data.client_index[client])[:SIZE]
            upload, velocities[client] = train(model, velocities[client], config.client, rows, number)
            uploads.append(upload)
        momentum = {
            name: 0.5 * momentum[name] + leaf - np.mean([upload[name] for upload in uploads], axis=0)
            for name, leaf in model.items()
        }
        model = {name: leaf - momentum[name] for name, leaf in model.items()}
        rows = np.asarray(data.server_index)
        model, server_velocity = train(model, server_velocity, config.server, rows, number)
        assert_model(state.model, model)
    assert {len(cohort) for cohort in cohorts} == {3}
    # Somebody came back after a round without it.
    assert any(cohorts[first] & cohorts[-1] - set.union(*cohorts[first + 1 : -1]) for first in range(ROUNDS - 2))


def velocities_of(state):
    """What the clients' optimisers keep, each client's as one vector: [4, n]."""
    leaves = jax.tree.leaves(state.clients["opt_state"])
    return np.concatenate([np.asarray(leaf).reshape(CLIENTS, -1) for leaf in leaves], axis=1)
