"""The server's own model, trained on its anchors from the same weights as the clients' models, beside the global one.

FedIL sends it to the clients and screens their uploads by it; FedAvg+FixMatch with a server in parallel averages it in.
"""

from typing import Any, NamedTuple

import jax

from fedjax_ssl.method import Problem, State
from fedjax_ssl.server import train_classifier
from fedjax_ssl.statistics import make_statistics

SERVER_MODEL = "model"  # the entry of `State.server` that holds it


class ServerModel(NamedTuple):
    """The server's own model.

    Attributes:
        params, batch_stats: theta_0, like those of the global model.
    """

    params: Any
    batch_stats: Any


def with_server_model(state: State) -> State:
    """The state with a place for the server's own model; until it is trained it is the global one."""
    return state._replace(server={**state.server, SERVER_MODEL: ServerModel(state.params, state.batch_stats)})


def train_server_model(problem: Problem, state: State, data, key: jax.Array) -> tuple[State, dict[str, jax.Array]]:
    """A stage of a method: trains the server's model from the global one, which stays as it is (FedIL, eq. 22).

    Under the 'static' policy its statistics are those of the server's images.
    """
    trained, metrics = train_classifier(problem, state, data, key)
    trained = make_statistics(problem.network, "server")(trained, data, jax.numpy.zeros((0,), jax.numpy.int32))
    own = ServerModel(trained.params, trained.batch_stats)
    return state._replace(server={**trained.server, SERVER_MODEL: own}), metrics
