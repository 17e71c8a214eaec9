"""Replicas of the server: each trains a copy of the global model on the labelled images for a group of clients."""

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Metrics, Problem, State
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.server.aggregation import weighted_mean
from fedjax_ssl.server.training import CLASSIFICATION, ServerPlan, supervised_loss, train_on_server_labels


def train_replicas(
    problem: Problem, state: State, data: FederatedData, key: jax.Array, rate: jax.Array, number: int, steps: int
) -> tuple[Model, State, Metrics]:
    """Trains copies of the global model for some steps of cross-entropy, each in its own random order.

    Args:
        problem: the run's; `server.epochs` is ignored.
        state: replicas start from its model. If optimizers are persistent, `state.server` has an entry
            `CLASSIFICATION` with leaves [G, ...].
        data: the federation's.
        key: for all replicas.
        rate: float32 [], the learning rate.
        number: G, number of replicas.
        steps: steps of each replica.

    Returns:
        The models, leaves [G, ...]; the state with their optimizers; and the mean of their `server_loss`.
    """
    remembers, plan = CLASSIFICATION in state.server, ServerPlan(supervised_loss(problem, data), epochs=0, steps=steps)

    def train(replica):
        own_key, memory = replica
        state_of_own = state._replace(server=memory)
        trained, metrics = train_on_server_labels(problem, state_of_own, data, own_key, rate, plan)
        return trained.model, trained.server, metrics

    memory = {CLASSIFICATION: state.server[CLASSIFICATION]} if remembers else {}
    models, memory, metrics = jax.lax.map(train, (jax.random.split(key, number), memory))
    return models, state._replace(server={**state.server, **memory}), jax.tree.map(jnp.mean, metrics)


def replica_means(uploads: Model, weights: jax.Array, in_group: jax.Array, replicas: Model) -> Model:
    """The mean of each group's uploads and its replica, which has the average weight of the uploads.

    Args:
        uploads: leaves [R, ...].
        weights: float32 [R], 0 for an upload that does not count.
        in_group: bool [G, R].
        replicas: like `uploads`, leaves [G, ...]. A group without an upload returns its replica.

    Returns:
        Leaves [G, ...].
    """

    def of_group(group):
        members, replica = group
        own = jnp.where(members, weights, 0.0)
        count = jnp.sum(own > 0)
        mean = weighted_mean(uploads, own, otherwise=replica)
        share = 1 / (count + 1)
        return jax.tree.map(lambda clients, server: (1 - share) * clients + share * server, mean, replica)

    return jax.lax.map(of_group, (in_group, replicas))
