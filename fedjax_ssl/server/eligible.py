"""Rounds in which only some clients are eligible. All others neither send nor receive anything."""

from collections.abc import Callable

import jax

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Method, Problem, Selection, State


def only_eligible(problem: Problem, method: Method, eligible: Callable[[State, FederatedData], jax.Array]) -> Method:
    """Restricts the rounds of a method to eligible clients, drawn uniformly and without replacement.

    A round has `clients_per_round` rows. If fewer clients are eligible, the other rows are absent. `eligible` is a
    function (state, data) -> bool [K].
    """

    def select(state: State, data: FederatedData, key: jax.Array) -> Selection:
        chosen = eligible(state, data)
        places = jax.random.uniform(key, chosen.shape) + chosen  # eligible clients get 1 or more, the others less
        clients = jax.lax.top_k(places, problem.config.clients_per_round)[1]
        return Selection(clients, present=chosen[clients])

    return method._replace(select=select)


def labelled_clients(data: FederatedData) -> jax.Array:
    """bool [K], the clients with a labelled image."""
    return data.labelled_size > 0
