"""The interface between a method and the engine.

A `Method` is a tuple of pure functions. Its clients' local training is a tuple of `Phase`s. All other types are
arguments and results of these functions.

Two rules hold for every method. `State.model` is the model that is tested, saved and loaded. An example is labelled if
and only if `data.visible_labels >= 0`, so whether a client has labels is data, not code.

Axes in shapes: K, all clients; M, the jobs of a round; R, rows of stacked results; C, classes; B, a batch; n_max, a
client's examples with padding. A job is one client's local training in a round.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.models.network import Network
from fedjax_ssl.ops.sgd import Model, make_optimizer
from fedjax_ssl.ops.trees import row, select, with_rows

Images = jax.Array
Augmentation = Callable[[jax.Array, Images], Images]
Metrics = dict[str, jax.Array]

CLASSIFIER = ("backbone", "classifier")  # the parts that cross-entropy trains and clients upload
# Names that the library adds to a round's record, some of them not in every run.
RESERVED = ("epsilon", "bytes_down", "bytes_up", "cohort_size", "answers")


class Problem(NamedTuple):
    """The argument of a method's factory: everything that is fixed during a run, except the data."""

    config: Any  # the run's configuration
    network: Network  # the architecture, as pure functions of a `Model` and images
    weak: Augmentation  # (key, images [B, H, W, C]) -> images, as the other augmentations
    strong: Augmentation
    num_classes: int  # C
    views: tuple[Augmentation, Augmentation] | None = None  # T and T' of `config.views`, for self-supervised methods
    # float32 [C], the labels of each class that clients reported before the first round; None: counted in the data.
    told_labels: jax.Array | None = None
    own_rule: Callable[..., Any] | None = None  # the user's rule that `confidence.kind` names; None: the library's
    # Whether examples lack a label of a known class, so that the configuration does not say how many a client has.
    lacks_labels: bool = False

    def optimizer(self, learning_rate: Any, clip_norm: float | None = None) -> optax.GradientTransformation:
        """The clients' optimizer, see `make_optimizer`."""
        return make_optimizer(self.config.client, learning_rate, clip_norm)


class State(NamedTuple):
    """Everything that is carried from one round to the next. PRNG keys are folded from seed and round instead."""

    round: jax.Array  # int32 [], rounds done
    model: Model  # the global model, which is tested, saved and loaded
    server: Mapping[str, Any] = {}  # the server's memory besides the model, with an entry for each part of the method
    clients: Mapping[str, Any] = {}  # the clients' own memory, every leaf [K, ...]
    # What the server remembers of each client, such as its last upload, every leaf [K, ...]. Methods use
    # `read_records` and `write_records`, because `config.residence` may keep only some clients' rows on the device.
    records: Mapping[str, Any] = {}

    @property
    def of_clients(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The entries with a row for each client: `clients` and `records`."""
        return self.clients, self.records


# --- The messages of a round. ----------------------------------------------------------------------------------------


class Selection(NamedTuple):
    """The jobs of a round, one in each row; a client may have several jobs."""

    clients: jax.Array  # int32 [M], client ids from 0 to K - 1, not checked; `present` marks rows without a job
    # int32 [M], the group of each row. None: the number of the row's turn if there are several turns, else no groups.
    group: jax.Array | None = None
    # A Python int that divides M: the number of cohorts of equal size, which train one after the other from the same
    # broadcast. A client starts each turn with its memory after the previous turn. `aggregate` gets the uploads of all
    # turns together.
    turns: int = 1
    # bool [M], False for rows without a job, so that the cohort size may vary between rounds; None: all have one.
    present: jax.Array | None = None


class Broadcast(NamedTuple):
    """The server's message to every client of a cohort. Local training reads `model` and `learning_rate`."""

    model: Model  # the global model
    learning_rate: jax.Array  # float32 [], for this round's local training
    extra: Any = ()  # any other pytree that the method sends


class Upload(NamedTuple):
    """A client's message to the server. The model is aggregated; `aggregate` may also read the metadata."""

    model: Model  # the parts that the client trained; `batch_stats` is () unless normalisation is 'running'
    metadata: Mapping[str, Any] = {}  # anything else, by name


class Received(NamedTuple):
    """The uploads of a cohort, with a row for each job; with several devices a row may be padding."""

    uploads: Upload  # Upload with leaves [R, ...]
    accepted: jax.Array  # bool [R], whether the row has an upload that is finite and not far longer than the others
    clients: jax.Array  # int32 [R], the client of each row
    group: jax.Array | None  # int32 [R], as in `Selection`; None: no groups
    sizes: jax.Array  # int32 [R], number of each client's examples; 0 for padding
    num_qualified: jax.Array  # int32 [R], number of examples trained on, from the `Report`; `sizes` without a report
    discount: jax.Array | None = None  # float32 [R], factor of a late upload's weight, 1 of others; None: all 1


class WireBytes(NamedTuple):
    """Counts the bytes of messages whose size depends on their values, such as sparse ones; both return float32 []."""

    down: Callable[[Any, Any], jax.Array]  # (broadcast, the client's row of `personal`) -> bytes that it receives
    up: Callable[[Upload], jax.Array]  # Upload of one client -> bytes that it sends


# --- What a client does. ---------------------------------------------------------------------------------------------


def job_keys(key: jax.Array, clients: jax.Array, group: jax.Array | None) -> jax.Array:
    """A PRNG key for each job, [M]: client and group are folded into the key, not lane or device."""
    keys = jax.vmap(lambda client: jax.random.fold_in(key, client))(clients)
    return keys if group is None else jax.vmap(jax.random.fold_in)(keys, group)


class Cohort(NamedTuple):
    """The clients of one round, as a phase's `prepare` sees them."""

    clients: jax.Array  # int32 [M], the client of each job (a client may have several jobs)
    own: Any  # the clients' memory after the previous phase, leaves [M, ...]; {} for a method without memory
    key: jax.Array  # the PRNG key for `prepare`, into which client and group are folded
    group: jax.Array | None = None  # int32 [M], as in `Selection`; None: no groups
    personal: Any = ()  # the message to each client, leaves [M, ...]
    round: jax.Array | None = None  # int32 [M], rounds done before this one, the same for all jobs
    labels: Any = None  # the cohort's `Labels`, before the last phase; None: the method makes none, or not yet
    step_key: jax.Array | None = None  # like `key`, for the steps; None if only `prepare` runs

    def keys(self) -> jax.Array:
        """A PRNG key for each job, [M]."""
        return job_keys(self.key, self.clients, self.group)


class Report(NamedTuple):
    """The pseudo-labels of a cohort, which evaluation compares with the true labels; never uploaded."""

    labels: jax.Array  # int32 [M, n_max], the pseudo-labels in use
    qualified: jax.Array  # bool [M, n_max], the examples that a client trains on
    others: Mapping[str, jax.Array] = {}  # labels of other rules by name, int32 [M, n_max], evaluated as well
    facts: Mapping[str, jax.Array] = {}  # float32 [M, n_max] by name; reported as means over unlabelled examples
    made: jax.Array | None = None  # bool [M, n_max], the examples that got a label and are evaluated; None: all


class Labels(NamedTuple):
    """The pseudo-labels of a cohort, which `Method.label` makes; leaves [M, ...]. A job reads its own row.

    A method that labels in every step has its rule's state here, and a report of the received model's labels.
    """

    report: Report  # the labels and which of them count
    own: Mapping[str, Any] = {}  # entries of the clients' memory that it updated, kept even if a client takes no part
    tells: Mapping[str, Any] = {}  # metadata that each client sends about its labels, by name
    weights: jax.Array | None = None  # float32 [M, n_max], images' weights in the loss
    state: Any = ()  # the state of the rule of confidence
    size: jax.Array | None = None  # int32 [M], the client's images that may get a label
    prior: jax.Array | None = None  # float32 [M, C], by which the client's probabilities are divided; None: by none
    more: Any = ()  # whatever else the method's phases read


class Jobs(NamedTuple):
    """The work that a phase's `prepare` makes for its cohort."""

    num_steps: jax.Array  # int32 [M], number of local steps; ignored for a job that takes no part
    work: Any  # any pytree that a job's functions read, leaves [M, ...]
    own: Mapping[str, Any] = {}  # entries of the clients' memory that it updated, kept even if a client takes no part
    takes_part: jax.Array | None = None  # bool [M], the jobs that make an upload; None: the jobs with steps


class Finished(NamedTuple):
    """The result of a job."""

    upload: Any  # in the last phase the message to the server, else what the next phase reads
    own: Mapping[str, Any]  # entries of the client's memory that the steps updated
    metrics: Metrics  # scalars by name, averaged over the job's steps


class Previous(NamedTuple):
    """The results of a phase, as `prepare` of the next phase gets them."""

    upload: Any  # leaves [M, ...], zeros for a job that took no part
    took_part: jax.Array  # bool [M]


# (received, data, cohort, results of the previous phase or None) -> the pseudo-labels of the whole cohort.
Label = Callable[[Broadcast, FederatedData, Cohort, Previous | None], Labels]
# (received, data, cohort, results of the previous phase or None) -> the work of the whole cohort.
Prepare = Callable[[Broadcast, FederatedData, Cohort, Previous | None], Jobs]
# (received, data, work, own) -> a job's carry (model and optimizer state) before its first step.
Start = Callable[[Broadcast, FederatedData, Any, Any], Any]
# (received, data, work, carry, number of the step, key of the step) -> carry.
Step = Callable[[Broadcast, FederatedData, Any, Any, jax.Array, jax.Array], Any]
# (received, work, carry, number of steps) -> a job's result. Jobs train side by side in lanes, and `finish` runs in all
# lanes whenever one job ends. So it must be cheap; a phase without steps does its heavy work in `prepare`.
Finish = Callable[[Broadcast, Any, Any, jax.Array], Finished]


class Phase(NamedTuple):
    """One part of local training: `prepare` runs once for the whole cohort, the other functions for each job."""

    prepare: Prepare
    start: Start
    step: Step
    finish: Finish


# --- What a method is. -----------------------------------------------------------------------------------------------


def no_op(state: State, *_: Any) -> tuple[State, Metrics]:
    """A stage that does nothing."""
    return state, {}


def read_records(state: State, data: FederatedData, clients: jax.Array) -> Mapping[str, Any]:
    """The server's records of clients that train in this round or that `Method.recalls` names: leaves [..., *].

    `clients` are ids, int32 [...]. Rows of any other client are arbitrary: its records may not be on the device.
    """
    return row(state.records, data.record_place(clients))


def write_records(state: State, data: FederatedData, received: Received, new: Mapping[str, Any]) -> State:
    """Writes new records, every entry of `State.records` with leaves [R, *], of clients whose uploads are accepted.

    A client has at most one of the R uploads. For errors see `checked_entries`.
    """
    new = checked_entries(new, state.records, "the server's record")
    place = data.record_place(received.clients)
    return state._replace(records=with_rows(state.records, place, new, received.accepted))


def checked_entries(new: Mapping[str, Any], old: Mapping[str, Any], noun: str, axes: int = 1) -> Mapping[str, Any]:
    """New rows of clients' entries, which must be like those of the first state: JAX would convert or broadcast them.

    `noun` says what an entry is; the number of leading `axes` may differ in length. Raises a UserError if an
    entry is unknown, or differs in its leaves, their shapes or types.
    """

    def told(entry: Any) -> list[str]:
        leaves = jax.tree.leaves_with_path(entry)
        return [f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape[axes:])}".strip() for path, leaf in leaves]

    for name, entry in new.items():
        if name not in old:
            raise UserError(f"the method writes {noun} {name!r}, which its first state does not have")
        for found, wanted in itertools.zip_longest(told(entry), told(old[name]), fillvalue="nothing"):
            if found != wanted:
                raise UserError(f"{noun} {name!r} is {wanted} in the method's first state, but it writes {found}")
    return new


def _name_is_taken(name: str) -> UserError:
    return UserError(f"the method's metric {name!r} has the name of another one; rename it")


def checked_metrics(metrics: Metrics, axes: int = 0) -> Metrics:
    """A method's metrics, of jobs with one axis; a UserError if one is no scalar or has one of the names `RESERVED`.

    The server's may also be an array with a number for each client, [K].
    """
    for name, value in metrics.items():
        if not jax.tree_util.all_leaves([value]) or jnp.ndim(value) not in (axes, 1):
            raise UserError(f"the method's metric {name!r} must be a scalar")
        if name in RESERVED:
            raise _name_is_taken(name)
    return metrics


def joined(*parts: Metrics) -> Metrics:
    """The metrics of several sources, the library's first; a UserError if two have a metric of the same name."""
    union: Metrics = {}
    for part in parts:
        for name in part:
            if name in union:
                raise _name_is_taken(name)
        union |= part
    return union


Select = Callable[[State, FederatedData, jax.Array], Selection]
# (state, data, received, key) -> the state with the new model, and metrics: scalars, or [K], a number for each client.
Aggregate = Callable[[State, FederatedData, Received, jax.Array], tuple[State, Metrics]]
Statistics = Callable[[State, FederatedData, jax.Array, jax.Array], State]


class Method(NamedTuple):
    """A federated semi-supervised method: its stages, each with its own PRNG key.

    A round calls `select`, `server_before`, `broadcast`, `personal`, `label`, `phases`, `aggregate`, `server_after`,
    `statistics`.
    """

    init: Callable[[FederatedData, jax.Array], State]  # (data, key) -> the first state, after any pre-training
    broadcast: Callable[[State, FederatedData, jax.Array], Broadcast]  # (state, data, key) -> the message to all
    phases: tuple[Phase, ...]  # local training after the broadcast; () if no client trains
    aggregate: Aggregate
    # (state, data, the round's clients int32 [M], key) -> the state with new global normalisation statistics.
    statistics: Statistics
    # (state, data, key) -> the jobs of a round; None: `clients_per_round` clients, uniformly, without replacement.
    select: Select | None = None
    # (state, data, key) -> the state after the server's training before the broadcast, and metrics.
    server_before: Callable[[State, FederatedData, jax.Array], tuple[State, Metrics]] = no_op
    # (state, data, clients int32 [M], key) -> a message to each of these clients, leaves [M, ...]; None: no message.
    personal: Callable[[State, FederatedData, jax.Array, jax.Array], Any] | None = None
    # (state after the previous round, clients int32 [M]) -> H further clients for each, whose records the round reads,
    # int32 [M, H]; ids below 0 are ignored. It may read only `State.round` and `State.server`. None: no further ones.
    recalls: Callable[[State, jax.Array], jax.Array] | None = None
    # (state, data, key) -> the state after the server's training that follows aggregation, and metrics.
    server_after: Callable[[State, FederatedData, jax.Array], tuple[State, Metrics]] = no_op
    label: Label | None = None  # makes pseudo-labels before the last phase, which reads `Cohort.labels`; None: none
    wire_bytes: WireBytes | None = None  # for messages whose size depends on their values; None: no such messages
    # data -> this method with the numbers of these data, for runs that share lanes; set where a round is traced.
    of_data: Callable[[FederatedData], Any] | None = None


def completed(model: Model, trained: Model) -> Model:
    """The whole `model` with the parts of `trained` in place of its own, see `trained_parts`."""
    return Model({**model.params, **trained.params}, trained.batch_stats or model.batch_stats)


def trained_parts(network: Network, model: Model, parts: tuple[str, ...]) -> Model:
    """The parts of a model that clients send: the named ones, and its statistics if normalisation is 'running'."""
    statistics = model.batch_stats if network.normalisation == "running" else ()
    return Model(select(model.params, parts), statistics)
