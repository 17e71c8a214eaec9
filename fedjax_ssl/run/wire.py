"""Bytes that travel in a round, from the leaves of the messages; nothing is computed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.engine.cohort import train_cohort
from fedjax_ssl.engine.interface import Draw, Method, Problem, State
from fedjax_ssl.engine.round import make_cohort, uniform
from fedjax_ssl.learning.trees import tree_bytes
from fedjax_ssl.server.statistics import num_exchanging


class Traffic(NamedTuple):
    """Bytes of a round.

    Attributes:
        jobs: messages down; each client that takes part sends one up.
        down, up: bytes of one client's messages.
        statistics_down, statistics_up: of all clients, in the exchange of normalisation statistics.
    """

    jobs: int
    down: int
    up: int
    statistics_down: int
    statistics_up: int


def bytes_per_client(problem: Problem, method: Method, state: State, data: Any) -> Traffic:
    """What one client sends or receives in a round."""
    config, network = problem.config, problem.network
    if not method.phases:
        return Traffic(0, 0, 0, 0, 0)
    select = method.select or uniform(config.clients_per_round)

    def exchange(state, data):
        key = jax.random.key(0)
        draw, broadcast = select(state, data, key), method.broadcast(state, data, key)
        first = Draw(jnp.zeros((1,), jnp.int32), None if draw.group is None else draw.group[:1])
        cohort = make_cohort(method, state, data, first, key, key)
        upload = train_cohort(method.phases, broadcast, data, cohort, 1).upload
        return draw, (broadcast, cohort.personal), upload

    draw, down, up = jax.eval_shape(exchange, state, data)
    exchanging = num_exchanging(network, config.model.statistics, len(draw.clients), config.num_clients)
    return Traffic(
        jobs=len(draw.clients),
        down=tree_bytes(down),
        up=tree_bytes(up),
        statistics_down=exchanging * tree_bytes(state.model.params),
        statistics_up=exchanging * tree_bytes(state.model.batch_stats),
    )
