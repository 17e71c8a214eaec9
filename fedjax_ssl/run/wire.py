"""Bytes that travel in a round."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.engine.cohort import train_cohort
from fedjax_ssl.engine.interface import Cohort, Method, Problem, State
from fedjax_ssl.learning.trees import tree_bytes
from fedjax_ssl.server.statistics import num_exchanging


def bytes_per_client(problem: Problem, method: Method, state: State, data: Any) -> dict[str, int]:
    """Bytes that one client sends or receives in a round, from the leaves of what travels; nothing is computed."""
    config, network = problem.config, problem.network
    if not method.phases:
        return {"down": 0, "up": 0, "statistics_down": 0, "statistics_up": 0}

    def exchange(state, data):
        broadcast = method.broadcast(state, data)
        cohort = Cohort(jnp.zeros((1,), jnp.int32), jax.tree.map(lambda x: x[:1], state.clients), jax.random.key(0))
        upload = train_cohort(method.phases, broadcast, data, cohort, 1).finished.upload
        return broadcast, jax.tree.map(lambda leaf: leaf[0], upload)

    broadcast, upload = jax.eval_shape(exchange, state, data)
    exchanging = num_exchanging(network, config.model.statistics, config.clients_per_round, config.num_clients)
    return {
        "down": tree_bytes(broadcast),
        "up": tree_bytes(upload),
        "statistics_down": exchanging * tree_bytes(state.model.params),
        "statistics_up": exchanging * tree_bytes(state.model.batch_stats),
    }
