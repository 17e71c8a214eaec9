"""The contract between a method and the engine: what a method is, what a client does, what travels.

A `Method` is a few pure functions in the order in which a round calls them; its clients' work is a tuple of `Phase`s.
All other types are arguments and results of these functions.

Two rules that every method may rely on: `State.model` is what is tested, saved and loaded; and
`data.visible_labels >= 0` is the one switch between labelled and unlabelled examples, so a client's role is data, not
code.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.learning.trees import select
from fedjax_ssl.models.network import Network

Images = jax.Array
Augmentation = Callable[[jax.Array, Images], Images]
Metrics = dict[str, jax.Array]

CLASSIFIER = ("backbone", "classifier")  # the parts that cross-entropy trains, and that clients upload


class Problem(NamedTuple):
    """The argument of a method's factory: all that is fixed in a run, except the data.

    Attributes:
        config: the run's configuration.
        network: the architecture, as pure functions of a `Model` and images.
        weak, strong: augmentations (key, images [B, H, W, C]) -> images.
        num_classes: C.
        views: the two augmentations of self-supervised methods, T and T' of `config.views`.
        told_labels: float32 [C], how many labels of each class clients told the server of before the first round; None:
            they are counted in the data.
        own_rule: a user's rule for confidence, that `confidence.kind` names; None: it is one of the library's.
    """

    config: Any
    network: Network
    weak: Augmentation
    strong: Augmentation
    num_classes: int
    views: tuple[Augmentation, Augmentation] | None = None
    told_labels: jax.Array | None = None
    own_rule: Callable[..., Any] | None = None


class State(NamedTuple):
    """Everything that survives a round. Random keys do not: they are folded from the seed and the round.

    Attributes:
        round: int32 [], rounds done.
        model: the global model: what is tested, saved and loaded.
        server: the server's memory besides the model, a dict with an entry for each part of the method.
        clients: the clients' memory, likewise; every leaf is [K, ...].
    """

    round: jax.Array
    model: Model
    server: Mapping[str, Any] = {}
    clients: Mapping[str, Any] = {}


# --- What travels. ---------------------------------------------------------------------------------------------------


class Selection(NamedTuple):
    """The jobs of a round, a row each; a client may have several.

    Attributes:
        clients: int32 [M], client ids.
        group: int32 [M], the group of each row; None: no groups, or with several turns the number of the turn.
        turns: a Python int that divides M: the rows are so many cohorts of equal size, one behind the other, which
            train in turn. All receive the same broadcast; a client begins each turn with the memory that the turn
            before left it. The uploads of all turns reach `aggregate` together.
        present: bool [M], which rows are jobs at all, so that a cohort's size may differ from round to round; None:
            all.
    """

    clients: jax.Array
    group: jax.Array | None = None
    turns: int = 1
    present: jax.Array | None = None


class Broadcast(NamedTuple):
    """What travels down to every client of a cohort. Local training reads `model` and `learning_rate`.

    Attributes:
        model: the global model.
        learning_rate: float32 [], of this round's local training.
        extra: any other pytree that the method sends.
    """

    model: Model
    learning_rate: jax.Array
    extra: Any = ()


class Upload(NamedTuple):
    """What travels up from one client: the model is aggregated, `aggregate` may read the metadata.

    Attributes:
        model: the parts that the client trained; `batch_stats` under the 'running' policy, else ().
        metadata: anything else, by name.
    """

    model: Model
    metadata: Mapping[str, Any] = {}


class Received(NamedTuple):
    """What reaches the server from a cohort, in R rows, one for each job; on several devices a row may be padding.

    Attributes:
        uploads: Upload with leaves [R, ...].
        accepted: bool [R], whether the job uploaded, every number is finite, and it is not far longer than the
            others, see `fedjax_ssl.engine.screening.too_long`.
        clients: int32 [R], the client of each row.
        group: int32 [R] of the `Selection`, or None.
        sizes: int32 [R], examples of each client; 0 for padding.
        num_qualified: int32 [R], examples that the client trained on by its report; `sizes` without a report.
        discount: float32 [R], by which the weight of each upload is multiplied, because it is late; None: 1.
    """

    uploads: Upload
    accepted: jax.Array
    clients: jax.Array
    group: jax.Array | None
    sizes: jax.Array
    num_qualified: jax.Array
    discount: jax.Array | None = None


class WireBytes(NamedTuple):
    """Bytes of messages whose size depends on their values, such as sparse ones; both float32 [].

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
        own: the clients' memory as the phase before left it, leaves [M, ...]; {} for a method without any.
        key: of the phase's `prepare`; steps have another. A client's randomness is folded from it by client and
            group, never by lane or device.
        group: int32 [M], or None.
        personal: the message to each client alone, leaves [M, ...].
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
    """The labels that a cohort made, for the scorer, which alone has the true ones; never uploaded.

    Attributes:
        labels: int32 [M, n_max], the pseudo-labels in use.
        qualified: bool [M, n_max], which of its examples a client trains on.
        others: by name, labels int32 [M, n_max] of other rules, which are scored as well.
        facts: by name, float32 [M, n_max], numbers of each example, whose means over the unlabelled ones are reported.
        made: bool [M, n_max], which examples got a label at all; None: all. The others are not scored.
    """

    labels: jax.Array
    qualified: jax.Array
    others: Mapping[str, jax.Array] = {}
    facts: Mapping[str, jax.Array] = {}
    made: jax.Array | None = None


class Jobs(NamedTuple):
    """The work that a phase's `prepare` lays out for its cohort.

    Attributes:
        num_steps: int32 [M], local steps of each job; one that takes no part makes none of them.
        work: what a job's steps read, leaves [M, ...].
        report: the labels that were made; None: none were.
        own: entries of the clients' memory that labelling updated, leaves [M, ...]; they survive whether or not the
            client takes part.
        takes_part: bool [M], which jobs make an upload, with steps or without; None: those that have a step.
    """

    num_steps: jax.Array
    work: Any
    report: Report | None = None
    own: Mapping[str, Any] = {}
    takes_part: jax.Array | None = None


class Finished(NamedTuple):
    """The result of a job.

    Attributes:
        upload: exactly what a network would carry up; of an earlier phase, what the next one reads.
        own: entries of the client's memory that the steps updated.
        metrics: scalars by name, averages over the job's steps.
    """

    upload: Any
    own: Mapping[str, Any]
    metrics: Metrics


class Previous(NamedTuple):
    """The results of a phase, for the `prepare` of the next one.

    Attributes:
        upload: leaves [M, ...], zeros for a job that took no part.
        took_part: bool [M].
    """

    upload: Any
    took_part: jax.Array


# (received, data, cohort, what the phase before left, None in the first one): the work of the whole cohort at once.
Prepare = Callable[[Broadcast, FederatedData, Cohort, Previous | None], Jobs]
# (received, data, work, own) -> the carry of a job, its model and optimiser, before its first step.
Start = Callable[[Broadcast, FederatedData, Any, Any], Any]
# (received, data, work, carry, number of the step, its key) -> carry.
Step = Callable[[Broadcast, FederatedData, Any, Any, jax.Array, jax.Array], Any]
# (received, work, carry, number of steps) -> the result of a job. In lanes it runs for all lanes whenever one job is
# over, so it must be cheap: a phase without steps does heavy work in its `prepare`.
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


# Stages of a method, each with a key of its own.
Init = Callable[[FederatedData, jax.Array], State]  # the first state, after the server's pre-training, if any
Select = Callable[[State, FederatedData, jax.Array], Selection]  # the jobs of a round
# Before the broadcast, or after the aggregation.
ServerTraining = Callable[[State, FederatedData, jax.Array], tuple[State, Metrics]]
MakeBroadcast = Callable[[State, FederatedData, jax.Array], Any]  # what travels to each client, see `Broadcast`
# (state, data, clients int32 [M], key) -> a message to each of these alone, leaves [M, ...].
Personal = Callable[[State, FederatedData, jax.Array, jax.Array], Any]
Aggregate = Callable[[State, FederatedData, Received, jax.Array], tuple[State, Metrics]]  # the uploads' model
# (state, data, the round's clients int32 [M], key) -> the state with new statistics of the global normalisation.
Statistics = Callable[[State, FederatedData, jax.Array, jax.Array], State]


class Method(NamedTuple):
    """A federated semi-supervised method, in the order of a round.

    Attributes:
        init, broadcast, aggregate, statistics, server_before, server_after: see their types.
        phases: what a client does with the broadcast; () if no client takes part.
        select: None: `clients_per_round` clients, uniformly, without replacement.
        personal: None: no message.
        converged: state -> bool [], whether the run ends before its last round; None: it does not.
        wire_bytes: for messages whose size is not that of their leaves; None: it is.
    """

    init: Init
    broadcast: MakeBroadcast
    phases: tuple[Phase, ...]
    aggregate: Aggregate
    statistics: Statistics
    select: Select | None = None
    server_before: ServerTraining = no_op
    personal: Personal | None = None
    server_after: ServerTraining = no_op
    converged: Callable[[State], jax.Array] | None = None
    wire_bytes: WireBytes | None = None


def completed(model: Model, trained: Model) -> Model:
    """A whole model again: `trained` parts, see `trained_parts`, in the place of those of `model`."""
    return Model({**model.params, **trained.params}, trained.batch_stats or model.batch_stats)


def trained_parts(network: Network, model: Model, parts: tuple[str, ...]) -> Model:
    """The named parts of a model, and its statistics where the policy aggregates them: what clients send."""
    statistics = model.batch_stats if network.normalisation == "running" else ()
    return Model(select(model.params, parts), statistics)
