"""Local training: steps of SGD on named batches of a client's examples. A method gives a plan and the loss of a step.

The plan runs once a round for the whole cohort: it shuffles each client's examples into decks, one for each batch of a
step. Then every client takes its steps in a lane.
"""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.fields import is_on
from fedjax_ssl.client.deck import Batch, Deck
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import (
    CLASSIFIER,
    Broadcast,
    Cohort,
    Finished,
    Jobs,
    Labels,
    Metrics,
    Phase,
    Previous,
    Problem,
    State,
    Upload,
    completed,
    trained_parts,
)
from fedjax_ssl.ops import sgd
from fedjax_ssl.ops.losses import proximal_term
from fedjax_ssl.ops.schedule import learning_rate_at
from fedjax_ssl.ops.sgd import BatchStats, Learner, Model
from fedjax_ssl.ops.trees import repeated, select, where, where_rows, without

OPT_STATE = "opt_state"  # name of a persistent optimizer's state in a client's memory
MakeOptimizer = Callable[[jax.Array | float], optax.GradientTransformation]  # learning rate -> optimizer


class Plan(NamedTuple):
    """What the clients of a cohort train on in a phase; leaves [M, ...]."""

    decks: Mapping[str, Deck]  # a shuffled deck for each of a step's batches, by the batch's name
    num_steps: jax.Array  # int32 [M], local steps
    work: Any = ()  # whatever else the loss reads, as `At.work`
    tells: Mapping[str, Any] = {}  # metadata of the uploads that is known before training, by name
    start: Model | None = None  # the models that training begins with; None: the received model
    own: Mapping[str, Any] = {}  # as in `Jobs`
    takes_part: jax.Array | None = None  # as in `Jobs`
    labels: Labels | None = None  # the pseudo-labels of this round; set by `local_training`


# (received, data, cohort, results of the previous phase or None) -> the plan of the whole cohort.
MakePlan = Callable[[Broadcast, FederatedData, Cohort, Previous | None], Plan]


class Batches(types.SimpleNamespace):
    """The examples of one step: a `Batch` for each of the plan's decks. A usual name without a deck is None."""

    labelled: Batch | None = None
    unlabelled: Batch | None = None


class Memory(dict[str, Any]):
    """A client's memory, as a method's functions read it: the error for an entry that nobody made says what to do."""

    def __missing__(self, name: str) -> Any:
        has = f"has {', '.join(self)}" if self else "is empty"
        raise UserError(
            f"the method reads {name!r} of a client's memory, which {has}; make the entry by `own`, an argument of "
            "alternating"
        )


class At(NamedTuple):
    """What the loss of a step may read besides the model and the batches."""

    received: Broadcast  # what the server sent
    data: FederatedData  # the federation's data
    decks: Mapping[str, Deck]  # the client's decks
    labels: Labels | None  # the client's pseudo-labels of this round; None if the method makes none
    work: Any  # `Plan.work` of this client
    own: Memory  # the client's memory, without the optimizer's state
    key: jax.Array  # the PRNG key of this step
    step: jax.Array  # int32 [], number of this step, from 0
    num_steps: jax.Array  # int32 [], the client's steps in this phase


class Loss(NamedTuple):
    """The loss of a model on the batches of a step."""

    value: jax.Array  # float32 [], the minimised value
    batch_stats: BatchStats  # the model's normalisation statistics after this forward pass
    metrics: Metrics  # scalars by name, averaged over the client's steps
    # bool [], whether the step is taken; None: it is. Weight decay and momentum would act at a zero gradient, too.
    counts: jax.Array | None = None
    remember: Mapping[str, Any] = {}  # entries of the client's memory after the step
    # Values by name, summed over the phase's steps, as `Upload.metadata`: for the server, or for the next phase's plan.
    sums: Mapping[str, jax.Array] = {}


# The loss of one step: a pure function, differentiated with respect to the model's trained parts.
LossFunction = Callable[[Model, Batches, At], Loss]
# (the client's memory with what the loss remembers, the model after the step) -> further entries of its memory.
After = Callable[[Mapping[str, Any], Model], Mapping[str, Any]]


class Training(NamedTuple):
    """The state of a client's loop."""

    learner: Learner  # model and optimizer
    own: Mapping[str, Any]  # the client's memory, without the optimizer's state
    learned: Mapping[str, Any]  # the entries of the memory that steps change, as they are now
    totals: Metrics  # float32 [] by name, sums of the metrics over the steps so far
    sums: Metrics  # `Loss.sums`, summed over the steps so far

    @property
    def memory(self) -> dict[str, Any]:
        """The client's memory as it is now."""
        return {**self.own, **self.learned}


def local_training(
    problem: Problem,
    plan: MakePlan,
    loss: LossFunction,
    sizes: Mapping[str, int],
    *,
    parts: tuple[str, ...] = CLASSIFIER,
    sent: tuple[str, ...] | None = None,
    begin: Callable[[Broadcast, Any], Model] | None = None,
    after: After | None = None,
    optimizer: MakeOptimizer | None = None,
    memory: str | None = OPT_STATE,
    continues: bool = False,
) -> Phase:
    """Makes a phase of planned steps: `plan` is that of a cohort, `loss` that of one step.

    Args:
        sizes: examples in each batch, by the batch's name.
        parts, sent: the trained parts of the model; those that are uploaded and in FedProx's term, None: the same.
        begin: (received, the client's memory) -> the model that training begins with; None: `Plan.start`.
        after: what the client remembers of the model after each step; None: only the loss changes its memory.
        optimizer, memory: the optimizer, None: the problem's; its entry if it is persistent, None: it is not.
        continues: whether jobs go on from the previous phase, see `going_on`.
    """
    for function, given in ((plan, 4), (loss, 3), (begin, 2), (after, 2)):
        if function:  # otherwise an error of arguments would name no line of the caller's
            inspect.signature(function).bind(*range(given))
    optimizer, sent = optimizer or problem.optimizer, sent or parts
    persistent = problem.config.client.persistent and memory is not None

    def prepare(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Jobs:
        planned = plan(received, data, cohort, previous)
        work = planned._replace(labels=cohort.labels, own={}, takes_part=None)
        jobs = Jobs(planned.num_steps, work, planned.own, planned.takes_part)
        return going_on(jobs, received, previous) if continues else jobs

    # Traced once, for the shapes that `start` needs and for the loop; inlined, so that a loop has only what it reads.
    @functools.partial(jax.jit, inline=True)
    def advance(learner: sgd.Learner, received: Broadcast, data: FederatedData, work: Plan, own, index, key):
        """A step: the learner after it, what the client remembers, the step's metrics and sums."""
        read = {name: deck.batch(index, sizes[name]).read(data) for name, deck in work.decks.items() if name in sizes}
        at = At(received, data, work.decks, work.labels, work.work, Memory(own), key, index, work.num_steps)
        minimised = functools.partial(with_proximal_term, problem, loss, sent, Batches(**read), at)
        after_step, result = sgd.step(minimised, optimizer(received.learning_rate), learner, parts)
        learner = after_step if result.counts is None else where(result.counts, after_step, learner)
        changes = {**result.remember, **(after(Memory(own, **result.remember), learner.model) if after else {})}
        return learner, changes, dict(result.metrics), dict(result.sums)

    def start(received: Broadcast, data: FederatedData, work: Plan, own) -> Training:
        model = begin(received, own) if begin else work.start or received.model
        learner = sgd.start(optimizer(received.learning_rate), model, parts)
        if persistent:
            learner = learner._replace(opt_state=own[memory])
        own = without(own, memory)
        _, changes, *sums = jax.eval_shape(advance, learner, received, data, work, own, jnp.int32(0), jax.random.key(0))
        learned = {name: own.pop(name) for name in changes}
        return Training(learner, own, learned, *jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), sums))

    def step(received: Broadcast, data: FederatedData, work: Plan, carry: Training, index, key) -> Training:
        learner, changes, *more = advance(carry.learner, received, data, work, carry.memory, index, key)
        totals, sums = jax.tree.map(jnp.add, [carry.totals, carry.sums], more)
        return Training(learner, carry.own, {**carry.learned, **changes}, totals, sums)

    def finish(received: Broadcast, work: Plan, carry: Training, num_steps) -> Finished:
        told = {**(work.labels.tells if work.labels else {}), **work.tells, **carry.sums}
        own = {**carry.learned, **({memory: carry.learner.opt_state} if persistent else {})}
        metrics = jax.tree.map(lambda total: total / jnp.maximum(num_steps, 1), carry.totals)
        return Finished(Upload(trained_parts(problem.network, carry.learner.model, sent), told), own, metrics)

    return Phase(prepare, start, step, finish)


def with_proximal_term(
    problem: Problem, loss: LossFunction, sent: tuple[str, ...], batches: Batches, at: At, model: Model
) -> tuple[jax.Array, tuple[BatchStats, Loss]]:
    """The loss of a step; with `client.proximal` the parameters `sent` stay near the received ones (FedProx)."""
    result, factor = loss(model, batches, at), problem.config.client.proximal
    value = result.value
    if is_on(factor):
        value = value + factor * proximal_term(select(model.params, sent), select(at.received.model.params, sent))
    return value, (result.batch_stats, result)


def going_on(jobs: Jobs, received: Broadcast, previous: Previous) -> Jobs:
    """The jobs, each from its model after the previous phase; one that took part there takes part again."""
    work = jobs.work._replace(start=trained_models(received, previous))
    takes_part = jobs.num_steps > 0 if jobs.takes_part is None else jobs.takes_part
    return jobs._replace(work=work, takes_part=takes_part | previous.took_part)


def global_model(problem: Problem, state: State, extra: Any = ()) -> Broadcast:
    """A broadcast of the global model, this round's learning rate and whatever `extra` a method sends."""
    rate = learning_rate_at(problem.config, problem.config.client.learning_rate, state.round)
    return Broadcast(state.model, rate, extra)


def trained_models(received: Broadcast, previous: Previous) -> Model:
    """Each job's whole model after the previous phase, leaves [M, ...]; the received model if the job has none."""
    whole = repeated(received.model, len(previous.took_part))
    return where_rows(previous.took_part, completed(whole, previous.upload.model), whole)


def own_optimizers(
    problem: Problem,
    data: FederatedData,
    model: Model,
    parts: tuple[str, ...],
    memory: str = OPT_STATE,
    optimizer: MakeOptimizer | None = None,
) -> dict[str, Any]:
    """The entry of `State.clients` for persistent optimizers, every leaf [K, ...]; {} if each job has a new optimizer.

    With momentum the entry is as large as K models, on the device and in every checkpoint.
    """
    if not problem.config.client.persistent:
        return {}
    opt_state = (optimizer or problem.optimizer)(0.0).init(select(model.params, parts))
    return {memory: repeated(opt_state, len(data.ids))}
