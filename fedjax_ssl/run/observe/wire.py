"""Bytes that travel in a round, from the leaves of the messages; nothing is computed."""

from typing import Any, NamedTuple

from fedjax_ssl.engine.compression import compressed_bytes
from fedjax_ssl.engine.interface import Method, Problem, State
from fedjax_ssl.engine.round import trace_exchange
from fedjax_ssl.learning.trees import tree_bytes
from fedjax_ssl.server.statistics import num_exchanging, num_passes


class Traffic(NamedTuple):
    """Bytes of a round."""

    jobs: int  # messages down; each client that takes part sends one up
    # down and up: bytes of one client's messages.
    down: int
    up: int
    # statistics_down and statistics_up: of all clients, in the exchange of normalisation statistics.
    statistics_down: int
    statistics_up: int


def bytes_per_client(problem: Problem, method: Method, state: State, data: Any) -> Traffic:
    """What one client sends or receives in a round."""
    config, network = problem.config, problem.network
    if not method.phases:
        return Traffic(0, 0, 0, 0, 0)

    exchange = trace_exchange(problem, method, state, data)
    jobs, up = len(exchange.selection.clients), tree_bytes(exchange.upload)
    if config.compression.kind != "none":
        params = exchange.upload.model.params
        up += compressed_bytes(config.compression, params) - tree_bytes(params)
    exchanging = num_exchanging(network, config.model.statistics, jobs, config.num_clients)
    # Under 'moments' the statistics go down and the sums up in each pass; parameters, which stay, in the first alone.
    statistics = tree_bytes(state.model.batch_stats)
    again = 0
    if exchanging and config.model.statistics == "moments":
        again = num_passes(network, config.model.statistics_passes, state.model) * statistics
    return Traffic(
        jobs=jobs,
        down=tree_bytes((exchange.broadcast, exchange.personal)),
        up=up,
        statistics_down=exchanging * (tree_bytes(state.model.params) + again),
        statistics_up=exchanging * (again or statistics),
    )
