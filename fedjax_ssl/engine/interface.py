"""What a method is: a few pure functions, in the order in which a round calls them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.learning.trees import select
from fedjax_ssl.models.network import Network

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
        model: the global model: what is tested, saved and loaded.
        server: a dict of what the parts of the method keep at the server besides, by their names.
        clients: a dict of what each client keeps for itself, by the parts' names, every leaf [K, ...].
    """

    round: jax.Array
    model: Model
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


CLASSIFIER = ("backbone", "classifier")  # the parts that cross-entropy trains, and that clients upload


class ModelUpload(NamedTuple):
    """A client's model as it travels up.

    Attributes:
        params: the parts that the client trained.
        batch_stats: its running averages under the 'running' policy, else ().
    """

    params: Any
    batch_stats: Any


def model_upload(network: Network, model: Any, parts: tuple[str, ...]) -> ModelUpload:
    """The named parts of a Learner's or a State's model, and its statistics where the policy aggregates them."""
    statistics = model.batch_stats if network.normalisation == "running" else ()
    return ModelUpload(select(model.params, parts), statistics)


Broadcast = Any


Work = Any


Carry = Any


class Cohort(NamedTuple):
    """The clients of one round.

    Attributes:
        clients: int32 [M], one client id a job (a client may appear in several jobs).
        states: the clients' own states, every leaf [M, ...]; () for a method whose clients keep nothing.
        key: the round's key. A client's randomness is folded from it by client id, never by lane or device.
    """

    clients: jax.Array
    states: Any
    key: jax.Array

    def keys(self) -> jax.Array:
        """A key for each job, [M]."""
        return jax.vmap(lambda client: jax.random.fold_in(self.key, client))(self.clients)


class Jobs(NamedTuple):
    """What a phase's `prepare` lays out for its cohort.

    Attributes:
        num_steps: int32 [M], local steps of each job; 0 means that the client does not take part.
        work: whatever a job's steps read, every leaf [M, ...].
        report: what the client tells about its data (pseudo-labels and masks), for scoring; never uploaded.
        kept: the entries of the clients' own states that labelling brought up to date, leaves [M, ...]; they survive
            whether or not a client takes a step.
    """

    num_steps: jax.Array
    work: Work
    report: Any
    kept: Mapping[str, Any] = {}


class Finished(NamedTuple):
    """What a job leaves behind.

    Attributes:
        upload: exactly what a network would carry up.
        state: the entries of the client's own state that the steps brought up to date.
        metrics: scalars by name, averages over the job's steps.
    """

    upload: Any
    state: Any
    metrics: dict[str, jax.Array]


class Phase(NamedTuple):
    """One stretch of a client's local work.

    Attributes:
        prepare: (broadcast, data, cohort, previous) -> Jobs, for the whole cohort at once; `previous` is the
            stacked Finished of the phase before, None in the first.
        start: (broadcast, work, state) -> carry: the job's model and optimiser, before its first step.
        step: (broadcast, data, work, carry, index, key) -> carry: local step number `index` with a key of its own.
        finish: (broadcast, work, carry, num_steps) -> Finished.
    """

    prepare: Callable[..., Jobs]
    start: Callable[..., Carry]
    step: Callable[..., Carry]
    finish: Callable[..., Finished]


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
