"""Counts the bytes of a round's messages from their shapes; no message is computed."""

from typing import Any, NamedTuple

from fedjax_ssl.client.personal import OWN_PARTS
from fedjax_ssl.engine.interface import Method, Problem, State
from fedjax_ssl.engine.tracing import Exchange, trace_exchange
from fedjax_ssl.engine.untrusted.compression import compressed_bytes
from fedjax_ssl.ops.trees import tree_bytes
from fedjax_ssl.server.statistics import num_exchanging, num_passes


class Traffic(NamedTuple):
    """Bytes of a round."""

    jobs: int  # messages down; each client that takes part sends one up
    down: int  # bytes that one client receives
    up: int  # bytes that one client sends
    statistics_down: int  # bytes that all clients receive in the exchange of normalisation statistics
    statistics_up: int  # bytes that all clients send in it
    asked: int = 1  # clients in that exchange if every job is run
    turns: int = 1  # with several, a client may have several jobs

    @property
    def most(self) -> int:
        """Bytes of a whole round if every job takes part."""
        return self.jobs * (self.down + self.up) + self.statistics_down + self.statistics_up


def bytes_per_client(problem: Problem, method: Method, state: State, data: Any) -> Traffic:
    """Bytes that one client receives and sends in a round; traces its messages."""
    return traffic_of(problem, state, trace_exchange(problem, method, state, data) if method.phases else None)


def traffic_of(problem: Problem, state: State, exchange: Exchange | None) -> Traffic:
    """Bytes that one client receives and sends in a round; `exchange` are its messages, None: no client trains."""
    if exchange is None:
        return Traffic(0, 0, 0, 0, 0)
    config, network = problem.config, problem.network
    jobs, up = len(exchange.selection.clients), tree_bytes(exchange.upload)
    if config.compression.kind != "none":
        params = exchange.upload.model.params
        up += compressed_bytes(config.compression, params) - tree_bytes(params)
    exchanging = num_exchanging(network, config.model.statistics, jobs, config.num_clients)
    # With 'moments', statistics go down and sums go up in each pass; the parameters stay and travel in the first pass
    # only.
    statistics = tree_bytes(state.model.batch_stats)
    params = {name: part for name, part in state.model.params.items() if name not in state.clients.get(OWN_PARTS, ())}
    again = 0
    if exchanging and config.model.statistics == "moments":
        again = num_passes(network, config.model.statistics_passes, state.model) * statistics
    return Traffic(
        jobs=jobs,
        down=tree_bytes((exchange.broadcast, exchange.personal)),
        up=up,
        statistics_down=exchanging * (tree_bytes(params) + again),
        statistics_up=exchanging * (again or statistics),
        asked=max(exchanging, 1),
        turns=exchange.selection.turns,
    )
