"""Rounds under the recipe `strong` against NumPy: the schedule, Nesterov, clipping, and what survives a round."""

import jax
import numpy as np

from conftest import TINY_BACKBONE
from conftest import make_fedanchor_config as make_tiny_config
from fedjax_ssl.config import apply_arguments
from fedjax_ssl.engine.round import make_round
from fedjax_ssl.methods import METHODS
from fedjax_ssl.run.experiment import build_experiment, initialise
from linear_network import LinearNetwork, at_rest, in_numpy, loss_and_gradient, sgd_step

ROUNDS = 4


def fields():
    """Every batch is a whole data set, so that no order matters; nothing is augmented."""
    return {
        "model.name": TINY_BACKBONE, "num_rounds": ROUNDS, "num_clients": 4, "clients_per_round": 3,
        "augment.padding": 0, "client.batch_size": 33, "server.batch_size": 40, "server.epochs": 2,
        "server.pretrain_epochs": 0, "client.learning_rate": 0.5, "server.learning_rate": 0.3,
    }  # fmt: skip


def test_rounds_under_the_recipe_strong():
    """Clients and server of FedAvg on given labels: SGD of each with a velocity of its own, kept for its next turn."""
    config = apply_arguments(make_tiny_config(**fields()), "supervised,strong")
    config.client.clip_norm = config.server.clip_norm = 0.1
    experiment = build_experiment(config)
    data, problem = experiment.data, experiment.problem._replace(network=LinearNetwork(64, 10))
    experiment = experiment._replace(problem=problem, method=METHODS["supervised"](problem))
    round_fn = jax.jit(make_round(problem, experiment.method, lanes=1))
    state = jax.jit(lambda data: initialise(experiment, data))(data)

    images = np.asarray(data.images).reshape(-1, 64) / 255.0
    one_hot = np.eye(10)[np.asarray(data.visible_labels)]
    model = in_numpy(state.params)
    server_velocity, momentum = at_rest(model), at_rest(model)
    velocities, cohorts = [at_rest(model) for _ in range(4)], []

    def train(model, velocity, section, rows, number):
        rate = section.learning_rate * (1 + np.cos(np.pi * number / ROUNDS)) / 2
        for _ in range(section.epochs):
            gradient = loss_and_gradient(model, images[rows], one_hot[rows])[1]
            model, velocity = sgd_step(model, gradient, velocity, section, rate)
        return model, velocity

    for number in range(ROUNDS):
        before = velocities_of(state)
        state, _ = round_fn(state, data, experiment.hidden_labels)
        cohort = np.flatnonzero(np.any(before != velocities_of(state), axis=1))
        cohorts.append(set(cohort.tolist()))
        uploads = []
        for client in cohort:
            rows = np.asarray(data.client_index[client])
            upload, velocities[client] = train(model, velocities[client], config.client, rows, number)
            uploads.append(upload)
        momentum = {
            name: 0.5 * momentum[name] + leaf - np.mean([upload[name] for upload in uploads], axis=0)
            for name, leaf in model.items()
        }
        model = {name: leaf - momentum[name] for name, leaf in model.items()}
        rows = np.asarray(data.anchor_index)
        model, server_velocity = train(model, server_velocity, config.server, rows, number)
        for name, leaf in in_numpy(state.params).items():
            np.testing.assert_allclose(leaf, model[name], atol=2e-5)
    assert {len(cohort) for cohort in cohorts} == {3}
    # Somebody came back after a round without it.
    assert any(cohorts[first] & cohorts[-1] - set.union(*cohorts[first + 1 : -1]) for first in range(ROUNDS - 2))


def velocities_of(state):
    """What the clients' optimisers keep, each client's as one vector: [4, n]."""
    leaves = jax.tree.leaves(state.clients["opt_state"])
    return np.concatenate([np.asarray(leaf).reshape(4, -1) for leaf in leaves], axis=1)
