"""What a method is: a few pure functions, in the order in which a round calls them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fedjax_ssl.clients import Phase
from fedjax_ssl.network import BatchStats, Network, Params

Images = jax.Array
Augmentation = Callable[[jax.Array, Images], Images]


class Problem(NamedTuple):
    """What a method's factory is given: everything about a run that is fixed and is not data.

    Attributes:
        config: the run's configuration.
        network: the model.
        weak, strong: augmentations (key, images [B, H, W, C]) -> images.
        num_classes: C.
    """

    config: Any
    network: Network
    weak: Augmentation
    strong: Augmentation
    num_classes: int


class State(NamedTuple):
    """Everything that survives a round. Randomness does not: it is folded from the seed and the round.

    Attributes:
        round: int32 [], rounds done.
        params, batch_stats: the global model.
        server: a dict of what the parts of the method keep at the server besides, by their names.
        clients: a dict of what each client keeps for itself, by the parts' names, every leaf [K, ...].
    """

    round: jax.Array
    params: Params
    batch_stats: BatchStats
    server: Any = ()
    clients: Any = ()


class Report(NamedTuple):
    """What a cohort tells about the labels it made, for the scorer, which alone knows the true ones.

    Attributes:
        pseudo_labels: name of the rule -> int32 [M, n_max]; the first is the one the method trains on.
        qualified: bool [M, n_max], which of its examples a client trains on.
    """

    pseudo_labels: dict[str, jax.Array]
    qualified: jax.Array


class Received(NamedTuple):
    """What reaches the server from a cohort, stacked over its M jobs.

    Attributes:
        uploads: a pytree with leaves [M, ...].
        accepted: bool [M]: there was an upload, and every number in it is finite.
        sizes: int32 [M], examples of each client.
        num_qualified: int32 [M], examples it trained on.
    """

    uploads: Any
    accepted: jax.Array
    sizes: jax.Array
    num_qualified: jax.Array


def unchanged(state: State, *_: Any) -> tuple[State, dict[str, jax.Array]]:
    """The stage of a method that does nothing there."""
    return state, {}


class Method(NamedTuple):
    """A federated semi-supervised method. Keys are the stage's own.

    Attributes:
        init: (data, key) -> State, with the server's pre-training where there is one.
        server_before: (state, data, key) -> (state, metrics), what the server trains before it broadcasts.
        broadcast: (state, data) -> pytree, exactly what travels to each client.
        phases: what a client does with it; the first phase's report is a `Report`. () where no client takes part.
        aggregate: (state, received) -> (state, metrics).
        server_after: (state, data, key) -> (state, metrics), what the server trains after it aggregated.
        statistics: (state, data, clients [M]) -> state, with the global normalisation statistics brought up to date.
        converged: state -> bool [], whether the run is to end before its last round; None: it never is.
    """

    init: Callable[..., State]
    broadcast: Callable[..., Any]
    phases: tuple[Phase, ...]
    aggregate: Callable[..., tuple[State, dict[str, jax.Array]]]
    statistics: Callable[..., State]
    server_before: Callable[..., tuple[State, dict[str, jax.Array]]] = unchanged
    server_after: Callable[..., tuple[State, dict[str, jax.Array]]] = unchanged
    converged: Callable[[State], jax.Array] | None = None
