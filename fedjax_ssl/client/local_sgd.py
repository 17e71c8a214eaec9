"""Local SGD of a client, shared by all methods: a method prepares the data and gives the loss of a step."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.client.deck import Batch
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import (
    CLASSIFIER,
    Broadcast,
    Finished,
    Metrics,
    Phase,
    Prepare,
    Previous,
    Problem,
    State,
    Upload,
    checked_metrics,
    completed,
    trained_parts,
)
from fedjax_ssl.learning import sgd
from fedjax_ssl.learning.losses import proximal_term
from fedjax_ssl.learning.schedule import learning_rate_at
from fedjax_ssl.learning.sgd import BatchStats, Learner, Model, make_optimizer
from fedjax_ssl.learning.trees import clip_update, repeated, select, where, where_rows

OPT_STATE = "opt_state"  # name of a persistent optimizer's state in a client's memory
Adapt = Callable[[optax.GradientTransformation], optax.GradientTransformation]


class At(NamedTuple):
    """What the loss of a step may read besides the model and the batch."""

    received: Broadcast  # what the server sent
    data: FederatedData  # the federation's data
    work: Any  # the client's work from `prepare`
    own: Mapping[str, Any]  # the client's memory, without the optimizer's state
    key: jax.Array  # the PRNG key of this step
    step: jax.Array  # int32 [], number of this step, from 0


class Loss(NamedTuple):
    """The loss of a model on a batch."""

    value: jax.Array  # float32 [], the minimised value
    batch_stats: BatchStats  # the model's normalisation statistics after this forward pass
    metrics: Metrics  # scalars by name, averaged over the job's steps
    aux: Any = ()  # any pytree, for `Hooks.remember`
    # bool [], whether the step is taken; None: it is. If it were taken with a zero gradient, weight decay and momentum
    # would still change the model.
    counts: jax.Array | None = None
    # Values by name, summed over the client's steps in this phase, as `Upload.metadata`: of the last phase for the
    # server, of another one for the next phase's `prepare`.
    sums: Mapping[str, jax.Array] = {}


# The loss of one step: a pure function, differentiated with respect to the model's trained parts.
LossFunction = Callable[[Model, Batch, At], Loss]


class Hooks(NamedTuple):
    """Changes that a method makes to local training. The defaults change nothing."""

    # (received, work, own) -> the model that training begins with; None: the received model.
    begin: Callable[[Broadcast, Any, Any], Model] | None = None
    # (own, model, aux, step) -> entries of the client's memory after a step, such as a mean teacher; None: steps
    # change no memory.
    remember: Callable[[Any, Model, Any, jax.Array], dict[str, Any]] | None = None
    # The parts that are uploaded, clipped and included in FedProx's term; None: all trained parts. The other trained
    # parts come from `begin` and are lost unless `remember` keeps them.
    sent: tuple[str, ...] | None = None
    # (work, model, totals) -> `Upload.metadata`, called once after the last step; `totals` are sums of the metrics
    # over the steps. None: only the loss's `sums` are sent.
    metadata: Callable[[Any, Model, Metrics], Mapping[str, Any]] | None = None
    adapt: Adapt | None = None  # makes the phase's optimizer from the configured one; None: no change
    # Name of the persistent optimizer's state in the client's memory. If several phases have an optimizer, each needs
    # its own entry, see `own_optimizers`.
    memory: str = OPT_STATE
    # Whether the model goes to the next phase instead of the server, so that it is not clipped.
    handed_on: bool = False


class Training(NamedTuple):
    """The state of a local training loop."""

    learner: Learner  # model and optimizer
    own: Mapping[str, Any]  # the client's memory, without the optimizer's state
    totals: Metrics  # float32 [] by name, sums of the metrics over the steps so far
    sums: Metrics  # `Loss.sums`, summed over the steps so far


def local_sgd(
    problem: Problem,
    prepare: Prepare,
    loss: LossFunction,
    parts: tuple[str, ...] = CLASSIFIER,
    batch_size: int | None = None,
    hooks: Hooks = Hooks(),  # noqa: B008, it cannot change
) -> Phase:
    """Makes a phase that trains the received model with the optimizer of `config.client` and uploads the trained parts.

    With `client.proximal` FedProx's term keeps the model near the received one. With `aggregation.clip_norm` the client
    clips its update before it sends it.

    Args:
        problem: the run's `Problem`.
        prepare: makes the work of a cohort. The work has a field `deck` with a `Deck`, a client's shuffled examples,
            which gives the batches.
        loss: the loss of one step.
        parts: the parts of the model that are trained and uploaded.
        batch_size: examples per batch; None: `client.batch_size`.
        hooks: a method's changes.

    Returns:
        The Phase. Its `start` raises a UserError if a metric of the loss is not a scalar.
    """
    network, config = problem.network, problem.config.client
    clip_norm = 0.0 if hooks.handed_on else problem.config.aggregation.clip_norm
    size, sent = batch_size or config.batch_size, parts if hooks.sent is None else hooks.sent

    def optimizer_at(learning_rate: jax.Array) -> optax.GradientTransformation:
        optimizer = make_optimizer(config, learning_rate)
        return optimizer if hooks.adapt is None else hooks.adapt(optimizer)

    @jax.jit  # so that it is traced once for equal shapes
    def first_loss(model: Model, received: Broadcast, data: FederatedData, work: Any, own: Mapping[str, Any]) -> Loss:
        at = At(received, data, work, own, jax.random.key(0), jnp.int32(0))
        return loss(model, work.deck.batch(at.step, size).read(data), at)

    def start(received: Broadcast, data: FederatedData, work, own) -> Training:
        model = received.model if hooks.begin is None else hooks.begin(received, work, own)
        learner = sgd.start(optimizer_at(received.learning_rate), model, parts)
        if config.persistent:
            learner = learner._replace(opt_state=own[hooks.memory])
        others = {name: value for name, value in own.items() if name != hooks.memory}
        shapes = jax.eval_shape(first_loss, model, received, data, work, others)
        totals = dict.fromkeys(checked_metrics(shapes.metrics), jnp.zeros(()))
        return Training(learner, others, totals, {name: jnp.zeros(sum.shape) for name, sum in shapes.sums.items()})

    def step(received: Broadcast, data: FederatedData, work, carry: Training, index, key) -> Training:
        batch, at = work.deck.batch(index, size).read(data), At(received, data, work, carry.own, key, index)

        def whole_loss(model: Model):
            result = loss(model, batch, at)
            value = result.value
            if config.proximal:
                term = proximal_term(select(model.params, sent), select(received.model.params, sent))
                value = value + config.proximal * term
            return value, (result.batch_stats, result)

        learner, result = sgd.step(whole_loss, optimizer_at(received.learning_rate), carry.learner, parts)
        if result.counts is not None:
            learner = where(result.counts, learner, carry.learner)
        own = carry.own
        if hooks.remember is not None:
            own = {**own, **hooks.remember(own, learner.model, result.aux, index)}
        totals, summed = jax.tree.map(
            jnp.add, (carry.totals, dict(carry.sums)), (dict(result.metrics), dict(result.sums))
        )
        return Training(learner, own, totals, summed)

    def finish(received: Broadcast, work, carry: Training, num_steps) -> Finished:
        trained = carry.learner.model
        own = {} if hooks.remember is None else carry.own
        if config.persistent:
            own = {**own, hooks.memory: carry.learner.opt_state}
        model = trained_parts(network, trained, sent)
        if clip_norm:
            shared = tuple(part for part in sent if part not in problem.config.personal_parts)
            new, old = (select(each.params, shared) for each in (model, received.model))
            model = model._replace(params={**model.params, **clip_update(new, old, clip_norm)})
        metadata = {} if hooks.metadata is None else hooks.metadata(work, trained, carry.totals)
        upload = Upload(model, {**metadata, **carry.sums})
        means = jax.tree.map(lambda total: total / jnp.maximum(num_steps, 1), carry.totals)
        return Finished(upload, own, means)

    return Phase(prepare, start, step, finish)


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
    adapt: Adapt | None = None,
) -> dict[str, Any]:
    """The entry of `State.clients` for persistent optimizers, every leaf [K, ...]; {} if each job has a new optimizer.

    With momentum the entry is as large as K models, on the device and in every checkpoint.
    """
    config = problem.config
    if not config.client.persistent:
        return {}
    optimizer = make_optimizer(config.client, 0.0)
    opt_state = (optimizer if adapt is None else adapt(optimizer)).init(select(model.params, parts))
    return {memory: repeated(opt_state, len(data.ids))}
