"""The contract between a method and the engine: what a method is, what a client does, what travels.

A method is a `Method`, a few pure functions in the order in which a round calls them. What its clients do is a tuple
of `Phase`s. Everything else here is what these functions are given and give back.

Two rules that every method may rely on: `State.model` is what is tested, saved and loaded; and
`data.visible_labels >= 0` alone says which examples have a label, so a client's role is data and not code.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.learning.trees import select
from fedjax_ssl.models.network import Network

Images = jax.Array
Augmentation = Callable[[jax.Array, Images], Images]
Metrics = dict[str, jax.Array]

CLASSIFIER = ("backbone", "classifier")  # the parts that cross-entropy trains, and that clients upload


class Problem(NamedTuple):
    """What a method's factory is given: everything about a run that is fixed and is not data.

    Attributes:
        config: the run's configuration.
        network: the architecture, as pure functions of a `Model` and images.
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
        model: the global model: what is tested, saved and loaded.
        server: a dict of the server's memory besides the model, an entry for each part of the method by its name.
        clients: a dict of the clients' own memory, likewise; every leaf is [K, ...].
    """

    round: jax.Array
    model: Model
    server: Mapping[str, Any] = {}
    clients: Mapping[str, Any] = {}


# --- What travels. ---------------------------------------------------------------------------------------------------


class Draw(NamedTuple):
    """The jobs of a round, a row each; a client may have several.

    Attributes:
        clients: int32 [M], client ids.
        group: int32 [M], the group that a row belongs to; None: there are no groups.
    """

    clients: jax.Array
    group: jax.Array | None = None


class Broadcast(NamedTuple):
    """What travels down to every client of a cohort. Local training reads these names from any method's broadcast.

    Attributes:
        model: the global model.
        learning_rate: float32 [], of this round's local training.
        extra: what the method sends besides, any pytree.
    """

    model: Model
    learning_rate: jax.Array
    extra: Any = ()


class Upload(NamedTuple):
    """What travels up from one client: the model is aggregated, what is told is read.

    Attributes:
        model: the parts that the client trained; `batch_stats` under the 'running' policy, else ().
        told: by name, whatever the method's `aggregate` reads besides.
    """

    model: Model
    told: Mapping[str, Any] = {}


class Received(NamedTuple):
    """What reaches the server from a cohort, in R rows, one for each job (some rows may only fill a device up).

    Attributes:
        uploads: Upload with leaves [R, ...].
        accepted: bool [R]: there was an upload, and every number in it is finite.
        clients: int32 [R], whose row it is.
        group: int32 [R] of the `Draw`, or None.
        sizes: int32 [R], examples of each client; 0 for a row that fills up.
        num_qualified: int32 [R], examples that the client's report says it trained on; `sizes` without a report.
    """

    uploads: Upload
    accepted: jax.Array
    clients: jax.Array
    group: jax.Array | None
    sizes: jax.Array
    num_qualified: jax.Array


class WireBytes(NamedTuple):
    """Bytes of messages whose size depends on their numbers, such as sparse ones; both float32 [].

    Attributes:
        down: (broadcast, the client's row of `personal`) -> bytes that one client receives.
        up: Upload of one client -> bytes that it sends.
    """

    down: Callable[[Any, Any], jax.Array]
    up: Callable[[Upload], jax.Array]


# --- What a client does. ---------------------------------------------------------------------------------------------


class Cohort(NamedTuple):
    """The clients of one round, as a phase's `prepare` sees them.

    Attributes:
        clients: int32 [M], one client id a job (a client may have several jobs).
        own: the clients' own memory as the phase before left it, leaves [M, ...]; {} where they keep nothing.
        key: the phase's key. A client's randomness is folded from it by client and group, never by lane or device.
        group: int32 [M], or None.
        personal: what came down to each client alone, leaves [M, ...].
    """

    clients: jax.Array
    own: Any
    key: jax.Array
    group: jax.Array | None = None
    personal: Any = ()

    def keys(self) -> jax.Array:
        """A key for each job, [M]."""
        keys = jax.vmap(lambda client: jax.random.fold_in(self.key, client))(self.clients)
        return keys if self.group is None else jax.vmap(jax.random.fold_in)(keys, self.group)


class Report(NamedTuple):
    """What a cohort tells about the labels it made, for the scorer, which alone knows the true ones; never uploaded.

    Attributes:
        labels: int32 [M, n_max], the pseudo-labels in use.
        qualified: bool [M, n_max], which of its examples a client trains on.
        others: labels int32 [M, n_max] of other rules, by their names, to be scored beside.
    """

    labels: jax.Array
    qualified: jax.Array
    others: Mapping[str, jax.Array] = {}


class Jobs(NamedTuple):
    """What a phase's `prepare` lays out for its cohort.

    Attributes:
        num_steps: int32 [M], local steps of each job; one that takes no part makes none of them.
        work: whatever a job's steps read, leaves [M, ...].
        report: on the labels that were made, if any.
        own: entries of the clients' own memory that labelling brought up to date, leaves [M, ...]; they survive
            whether or not the client takes part.
        takes_part: bool [M], whose `finish` makes an upload, with steps or without; None: whoever has a step.
    """

    num_steps: jax.Array
    work: Any
    report: Report | None = None
    own: Mapping[str, Any] = {}
    takes_part: jax.Array | None = None


class Finished(NamedTuple):
    """What a job leaves behind.

    Attributes:
        upload: exactly what a network would carry up; of a phase that is not the last, what the next one reads.
        own: entries of the client's own memory that the steps brought up to date.
        metrics: scalars by name, averages over the job's steps.
    """

    upload: Any
    own: Mapping[str, Any]
    metrics: Metrics


class Previous(NamedTuple):
    """What a phase left behind, for the `prepare` of the next one.

    Attributes:
        upload: leaves [M, ...], zeros for who took no part.
        took_part: bool [M].
    """

    upload: Any
    took_part: jax.Array


class Phase(NamedTuple):
    """One stretch of a client's local work.

    Attributes:
        prepare: (broadcast, data, cohort, previous) -> Jobs, for the whole cohort at once; `previous` is the
            phase before as a `Previous`, None in the first.
        start: (broadcast, work, own) -> carry: the job's model and optimiser, before its first step.
        step: (broadcast, data, work, carry, index, key) -> carry: local step number `index` with a key of its own.
        finish: (broadcast, work, carry, num_steps) -> Finished. In lanes it runs for all lanes whenever one job is
            over, so nothing heavy belongs here: a phase without steps does that in its `prepare`.
    """

    prepare: Callable[..., Jobs]
    start: Callable[..., Any]
    step: Callable[..., Any]
    finish: Callable[..., Finished]


# --- What a method is. -----------------------------------------------------------------------------------------------


def no_op(state: State, *_: Any) -> tuple[State, Metrics]:
    """The stage of a method that does nothing there."""
    return state, {}


class Method(NamedTuple):
    """A federated semi-supervised method, in the order of a round. Every stage has a key of its own.

    Attributes:
        init: (data, key) -> State, with the server's pre-training where there is one.
        broadcast: (state, data, key) -> pytree, exactly what travels to each client; see `Broadcast`.
        phases: what a client does with it. () where no client takes part.
        aggregate: (state, data, received, key) -> (state, metrics).
        statistics: (state, data, clients [M], key) -> state, with the global normalisation statistics brought up to
            date.
        select: (state, data, key) -> Draw; None: `clients_per_round` of all clients, uniformly, without replacement.
        server_before: (state, data, key) -> (state, metrics), what the server trains before it broadcasts.
        personal: (state, data, clients [M], key) -> pytree with leaves [M, ...], what travels to one client alone;
            None: nothing.
        server_after: (state, data, key) -> (state, metrics), what the server trains after it aggregated.
        converged: state -> bool [], whether the run is to end before its last round; None: it never is.
        wire_bytes: of messages that are not as large as their leaves; None: all are.
    """

    init: Callable[..., State]
    broadcast: Callable[..., Any]
    phases: tuple[Phase, ...]
    aggregate: Callable[..., tuple[State, Metrics]]
    statistics: Callable[..., State]
    select: Callable[..., Draw] | None = None
    server_before: Callable[..., tuple[State, Metrics]] = no_op
    personal: Callable[..., Any] | None = None
    server_after: Callable[..., tuple[State, Metrics]] = no_op
    converged: Callable[[State], jax.Array] | None = None
    wire_bytes: WireBytes | None = None


def trained_parts(network: Network, model: Model, parts: tuple[str, ...]) -> Model:
    """The named parts of a model, and its statistics where the policy aggregates them: what clients send."""
    statistics = model.batch_stats if network.normalisation == "running" else ()
    return Model(select(model.params, parts), statistics)
