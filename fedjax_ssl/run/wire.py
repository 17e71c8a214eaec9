"""Bytes that travel in a round, from the leaves of the messages; nothing is computed."""

from typing import Any, NamedTuple

import jax

from fedjax_ssl.engine.cohort import train_cohort
from fedjax_ssl.engine.interface import Method, Problem, State
from fedjax_ssl.engine.round import one_job
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

    def exchange(state, data):
        draw, broadcast, cohort = one_job(problem, method, state, data)
        upload = train_cohort(method.phases, broadcast, data, cohort, 1).upload
        # On several devices there is a row for each of them.
        return draw, (broadcast, cohort.personal), jax.tree.map(lambda leaf: leaf[0], upload)

    draw, down, up = jax.eval_shape(exchange, state, data)
    exchanging = num_exchanging(network, config.model.statistics, len(draw.clients), config.num_clients)
    return Traffic(
        jobs=len(draw.clients),
        down=tree_bytes(down),
        up=tree_bytes(up),
        statistics_down=exchanging * tree_bytes(state.model.params),
        statistics_up=exchanging * tree_bytes(state.model.batch_stats),
    )
