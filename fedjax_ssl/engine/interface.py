"""The interface between a method and the engine.

A `Method` consists of pure functions, in the order in which a round calls them; its clients' work is a tuple of
`Phase`s. All other types are arguments and results of these functions.

Every method may rely on two rules. `State.model` is what is tested, saved and loaded. And `data.visible_labels >= 0` is
the only switch between labelled and unlabelled examples, so that a client's role is data, not code.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.learning.trees import row, select
from fedjax_ssl.models.network import Network

Images = jax.Array
Augmentation = Callable[[jax.Array, Images], Images]
Metrics = dict[str, jax.Array]

CLASSIFIER = ("backbone", "classifier")  # the parts that cross-entropy trains and clients upload


class Problem(NamedTuple):
    """The argument of a method's factory: everything fixed in a run except the data."""

    config: Any  # the run's configuration
    network: Network  # the architecture, as pure functions of a `Model` and images
    # weak and strong: augmentations (key, images [B, H, W, C]) -> images.
    weak: Augmentation
    strong: Augmentation
    num_classes: int  # C
    # The two augmentations of self-supervised methods, T and T' of `config.views`.
    views: tuple[Augmentation, Augmentation] | None = None
    # float32 [C], the labels of each class that clients reported to the server before the first round; None: they are
    # counted in the data.
    told_labels: jax.Array | None = None
    # A user's rule for confidence, named by `confidence.kind`; None: a rule of the library.
    own_rule: Callable[..., Any] | None = None


class State(NamedTuple):
    """Everything that survives a round. Random keys are folded from the seed and the round instead."""

    round: jax.Array  # int32 [], rounds done
    model: Model  # the global model: what is tested, saved and loaded
    # The server's memory besides the model: a dict with an entry for each part of the method.
    server: Mapping[str, Any] = {}
    clients: Mapping[str, Any] = {}  # the clients' memory, a dict as well; every leaf is [K, ...]
    # The server's records of each client, such as its last upload, a dict as well; every leaf is [K, ...]. Methods use
    # `read_records` and `write_records`: with `config.residence` only some clients' rows are on the device.
    records: Mapping[str, Any] = {}

    @property
    def of_clients(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """What has a row for each client: `clients` and `records`."""
        return self.clients, self.records


# --- What travels. ---------------------------------------------------------------------------------------------------


class Selection(NamedTuple):
    """The jobs of a round, one in each row; a client may have several."""

    clients: jax.Array  # int32 [M], client ids
    # int32 [M], the group of each row; with several turns, the number of the turn. None: no groups.
    group: jax.Array | None = None
    # A Python int that divides M: the rows are this many cohorts of equal size, which train one after the other. All
    # receive the same broadcast; a client starts each turn with its memory after the previous turn. `aggregate` gets
    # the uploads of all turns together.
    turns: int = 1
    # bool [M], the rows that are jobs, so that the cohort size may vary between rounds; None: all.
    present: jax.Array | None = None


class Broadcast(NamedTuple):
    """What travels down to every client of a cohort. Local training reads `model` and `learning_rate`."""

    model: Model  # the global model
    learning_rate: jax.Array  # float32 [], of this round's local training
    extra: Any = ()  # any other pytree that the method sends


class Upload(NamedTuple):
    """What travels up from one client: the model is aggregated, `aggregate` may read the metadata."""

    model: Model  # the parts that the client trained; `batch_stats` under the 'running' policy, else ()
    metadata: Mapping[str, Any] = {}  # anything else, by name


class Received(NamedTuple):
    """What reaches the server from a cohort, in R rows, one for each job; with several devices a row may be padding."""

    uploads: Upload  # Upload with leaves [R, ...]
    # bool [R], whether the job has an upload, all of its numbers are finite, and it is not far longer than the others,
    # see `fedjax_ssl.engine.screening.too_long`.
    accepted: jax.Array
    clients: jax.Array  # int32 [R], the client of each row
    group: jax.Array | None  # int32 [R] of the `Selection`, or None
    sizes: jax.Array  # int32 [R], examples of each client; 0 for padding
    num_qualified: jax.Array  # int32 [R], the examples a client trained on by its report; `sizes` without a report
    # float32 [R], factors of the uploads' weights, below 1 for late ones; None: 1.
    discount: jax.Array | None = None


class WireBytes(NamedTuple):
    """Bytes of messages whose size depends on their values, such as sparse ones; both give float32 []."""

    # (broadcast, the client's row of `personal`) -> bytes that one client receives.
    down: Callable[[Any, Any], jax.Array]
    up: Callable[[Upload], jax.Array]  # Upload of one client -> bytes that it sends


# --- What a client does. ---------------------------------------------------------------------------------------------


class Cohort(NamedTuple):
    """The clients of one round, as a phase's `prepare` sees them."""

    clients: jax.Array  # int32 [M], the client of each job (a client may have several jobs)
    own: Any  # the clients' memory after the previous phase, leaves [M, ...]; {} for a method without memory
    # The key of the phase's `prepare`. A client's keys are folded from it by client and group, not by lane or device.
    key: jax.Array
    group: jax.Array | None = None  # int32 [M], or None
    personal: Any = ()  # the message to each client, leaves [M, ...]
    round: jax.Array | None = None  # int32 [M], rounds done before this one, the same for all jobs
    step_key: jax.Array | None = None  # as `key`, of the steps; None where only `prepare` runs

    def keys(self) -> jax.Array:
        """A key for each job, [M]."""
        keys = jax.vmap(lambda client: jax.random.fold_in(self.key, client))(self.clients)
        return keys if self.group is None else jax.vmap(jax.random.fold_in)(keys, self.group)


class Report(NamedTuple):
    """The labels that a cohort made, for evaluation against the true labels; never uploaded."""

    labels: jax.Array  # int32 [M, n_max], the pseudo-labels in use
    qualified: jax.Array  # bool [M, n_max], the examples that a client trains on
    others: Mapping[str, jax.Array] = {}  # by name, labels int32 [M, n_max] of other rules, which are evaluated as well
    # By name, float32 [M, n_max], a number for each example; the means over unlabelled examples are reported.
    facts: Mapping[str, jax.Array] = {}
    # bool [M, n_max], the examples that got a label, and are evaluated; None: all.
    made: jax.Array | None = None


class Jobs(NamedTuple):
    """The work that a phase's `prepare` makes for its cohort."""

    num_steps: jax.Array  # int32 [M], local steps of each job; 0 steps are made if it takes no part
    work: Any  # what a job's steps read, leaves [M, ...]
    report: Report | None = None  # the labels that were made; None: none
    # Entries of the clients' memory that labelling updated, leaves [M, ...]; they are kept whether or not the client
    # takes part.
    own: Mapping[str, Any] = {}
    # bool [M], the jobs that make an upload, with or without steps; None: those with steps.
    takes_part: jax.Array | None = None


class Finished(NamedTuple):
    """The result of a job."""

    upload: Any  # exactly what a network would transmit; of an earlier phase, what the next phase reads
    own: Mapping[str, Any]  # entries of the client's memory that the steps updated
    metrics: Metrics  # scalars by name, averages over the job's steps


class Previous(NamedTuple):
    """The results of a phase, for `prepare` of the next phase."""

    upload: Any  # leaves [M, ...], zeros for a job that took no part
    took_part: jax.Array  # bool [M]


# (received, data, cohort, results of the previous phase or None) -> the work of the whole cohort.
Prepare = Callable[[Broadcast, FederatedData, Cohort, Previous | None], Jobs]
# (received, data, work, own) -> a job's carry before its first step: model and optimizer.
Start = Callable[[Broadcast, FederatedData, Any, Any], Any]
# (received, data, work, carry, step number, its key) -> carry.
Step = Callable[[Broadcast, FederatedData, Any, Any, jax.Array, jax.Array], Any]
# (received, work, carry, number of steps) -> a job's result. It runs for all lanes whenever one job ends, so it must be
# cheap: a phase without steps does heavy work in `prepare`.
Finish = Callable[[Broadcast, Any, Any, jax.Array], Finished]


class Phase(NamedTuple):
    """One part of a client's local work."""

    prepare: Prepare
    start: Start
    step: Step
    finish: Finish


# --- What a method is. -----------------------------------------------------------------------------------------------


def no_op(state: State, *_: Any) -> tuple[State, Metrics]:
    """A stage that does nothing."""
    return state, {}


def read_records(state: State, data: FederatedData, clients: jax.Array) -> Mapping[str, Any]:
    """The server's records of some clients of the round, or of some that it recalls.

    Args:
        state: with the records.
        data: the federation.
        clients: int32 [...], their ids. For others, whose records may be elsewhere, rows are arbitrary.

    Returns:
        As `State.records`, leaves [..., *] in place of [K, *].
    """
    return row(state.records, data.record_place(clients))


def write_records(state: State, data: FederatedData, received: Received, new: Mapping[str, Any]) -> State:
    """The state with new records of the clients whose uploads are accepted.

    Args:
        state: with the records.
        data: the federation.
        received: the R uploads; no client has several.
        new: every entry of `State.records`, leaves [R, *].
    """
    place = jnp.where(received.accepted, data.record_place(received.clients), jnp.iinfo(jnp.int32).max)
    put = lambda old, rows: old.at[place].set(rows, mode="drop")  # noqa: E731
    return state._replace(records=jax.tree.map(put, state.records, new))


# Stages of a method, each with a key of its own.
Init = Callable[[FederatedData, jax.Array], State]  # the first state, after any pre-training at the server
Select = Callable[[State, FederatedData, jax.Array], Selection]  # the jobs of a round
# Before the broadcast, or after aggregation.
ServerTraining = Callable[[State, FederatedData, jax.Array], tuple[State, Metrics]]
MakeBroadcast = Callable[[State, FederatedData, jax.Array], Any]  # the message to all clients, see `Broadcast`
# (state, data, clients int32 [M], key) -> a message to each of these clients, leaves [M, ...].
Personal = Callable[[State, FederatedData, jax.Array, jax.Array], Any]
# (state after the round before, clients int32 [M]) -> further clients whose records the round reads for each of these,
# int32 [M, H]; below 0: nobody. It runs before their records are on the device, and reads `round` and `server` alone.
Recalls = Callable[[State, jax.Array], jax.Array]
Aggregate = Callable[[State, FederatedData, Received, jax.Array], tuple[State, Metrics]]  # the new model
# (state, data, the round's clients int32 [M], key) -> the state with new global normalisation statistics.
Statistics = Callable[[State, FederatedData, jax.Array, jax.Array], State]


class Method(NamedTuple):
    """A federated semi-supervised method, in the order of a round. The types above define the stages."""

    init: Init
    broadcast: MakeBroadcast
    phases: tuple[Phase, ...]  # a client's work after the broadcast; () if no client takes part
    aggregate: Aggregate
    statistics: Statistics
    select: Select | None = None  # None: `clients_per_round` clients, uniformly, without replacement
    server_before: ServerTraining = no_op
    personal: Personal | None = None  # None: no message
    recalls: Recalls | None = None  # None: a round reads the records of its own clients alone
    server_after: ServerTraining = no_op
    # State -> bool [], whether the run ends before its last round; None: never.
    converged: Callable[[State], jax.Array] | None = None
    wire_bytes: WireBytes | None = None  # of messages whose size depends on their values; None: no such messages


def completed(model: Model, trained: Model) -> Model:
    """The whole `model` with its trained parts replaced by those of `trained`, see `trained_parts`."""
    return Model({**model.params, **trained.params}, trained.batch_stats or model.batch_stats)


def trained_parts(network: Network, model: Model, parts: tuple[str, ...]) -> Model:
    """The named parts of a model, with its statistics if the policy aggregates them: what clients send."""
    statistics = model.batch_stats if network.normalisation == "running" else ()
    return Model(select(model.params, parts), statistics)
