"""A client's local SGD, the same for all methods: a method lays out the data and gives the loss of a step."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

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
    completed,
    trained_parts,
)
from fedjax_ssl.learning import sgd
from fedjax_ssl.learning.losses import proximal_term
from fedjax_ssl.learning.schedule import learning_rate_at
from fedjax_ssl.learning.sgd import BatchStats, Learner, Model, make_optimizer
from fedjax_ssl.learning.trees import clip_update, repeated, select, where, where_rows

OPT_STATE = "opt_state"  # the entry of a persistent optimiser in a client's memory
Adapt = Callable[[optax.GradientTransformation], optax.GradientTransformation]


class At(NamedTuple):
    """What the loss of a step may read besides the model and the batch."""

    received: Broadcast  # the `Broadcast`
    data: FederatedData  # the federation's data
    work: Any  # the client's, as `prepare` laid it out
    own: Mapping[str, Any]  # the client's memory, without the optimiser's
    key: jax.Array  # of this step
    step: jax.Array  # int32 [], the number of this step, from 0


class Loss(NamedTuple):
    """The loss of a model on a batch."""

    value: jax.Array  # float32 [], what the step minimises
    batch_stats: BatchStats  # of the model after this pass
    metrics: Metrics  # scalars by name, averaged over the job's steps
    aux: Any = ()  # for `Hooks.remember`, any pytree
    # bool [], whether the step is taken; without a gradient, weight decay and the momentum of earlier steps would still
    # change the model. None: it is.
    counts: jax.Array | None = None
    sums: Mapping[str, jax.Array] = {}  # by name, what the client tells the server: added up over its steps


class LossFunction(Protocol):
    """The loss of one step: a pure function, differentiated by the model's trained parts."""

    def __call__(self, model: Model, batch: Batch, at: At) -> Loss: ...


class Hooks(NamedTuple):
    """What a few methods change in a local training. By default nothing."""

    # (received, work, own) -> the model that training begins with; None: the received one.
    begin: Callable[[Broadcast, Any, Any], Model] | None = None
    # (own, model, aux, step) -> entries of the client's memory after a step, such as a mean teacher's; None: steps
    # leave no memory.
    remember: Callable[[Any, Model, Any, jax.Array], dict[str, Any]] | None = None
    # (received, work, model, totals) -> the model that is uploaded; None: the trained one.
    send: Callable[[Broadcast, Any, Model, Metrics], Model] | None = None
    # The parts that are uploaded, clipped and held by FedProx's term; the other trained parts are in the model that
    # `begin` gives, and lost unless `remember` keeps them. None: all trained parts.
    sent: tuple[str, ...] | None = None
    # (work, model, totals) -> `Upload.metadata`, once after the last step; `totals` are the metrics' sums over the
    # steps. None: nothing is told but the loss's `sums`.
    metadata: Callable[[Any, Model, Metrics], Mapping[str, Any]] | None = None
    adapt: Adapt | None = None  # makes the optimiser of the phase out of the configuration's; None: it is that one
    # The entry of the client's memory that a persistent optimiser has; phases with an optimiser each have an entry
    # each, see `own_optimizers`.
    memory: str = OPT_STATE
    # Whether the model goes to the next phase and not to the server, so that nothing is clipped.
    handed_on: bool = False


class Training(NamedTuple):
    """The state of a local training loop."""

    learner: Learner  # model and optimiser
    own: Mapping[str, Any]  # the client's memory, without the optimiser's
    totals: Metrics  # float32 [] by name, the metrics' sums over the steps so far
    sums: Metrics  # of the losses' `sums`, likewise


def local_sgd(
    problem: Problem,
    prepare: Prepare,
    loss: LossFunction,
    parts: tuple[str, ...] = CLASSIFIER,
    batch_size: int | None = None,
    hooks: Hooks = Hooks(),  # noqa: B008, it cannot change
) -> Phase:
    """A phase that trains the received model, with `config.client`'s optimiser, and uploads the trained parts.

    With `client.proximal` FedProx's term holds the model near the received one; with `aggregation.clip_norm` the
    client clips its update before it sends it.

    Args:
        problem: the run.
        prepare: lays out the work of a cohort; its work has a `Deck` named `deck`, which gives the batches.
        loss: of one step.
        parts: of the model that are trained and uploaded.
        batch_size: of a batch; None: `client.batch_size`.
        hooks: what differs from this.

    Returns:
        The Phase.
    """
    network, config = problem.network, problem.config.client
    clip_norm = 0.0 if hooks.handed_on else problem.config.aggregation.clip_norm
    size, sent = batch_size or config.batch_size, parts if hooks.sent is None else hooks.sent

    def optimizer_at(learning_rate: jax.Array) -> optax.GradientTransformation:
        optimizer = make_optimizer(config, learning_rate)
        return optimizer if hooks.adapt is None else hooks.adapt(optimizer)

    def batch_at(data: FederatedData, work: Any, step: jax.Array) -> Batch:
        return work.deck.batch(step, size).read(data)

    @jax.jit  # so that it is traced once for the same shapes
    def first_loss(model: Model, received: Broadcast, data: FederatedData, work: Any, own: Mapping[str, Any]) -> Loss:
        at = At(received, data, work, own, jax.random.key(0), jnp.int32(0))
        return loss(model, batch_at(data, work, at.step), at)

    def start(received: Broadcast, data: FederatedData, work, own) -> Training:
        model = received.model if hooks.begin is None else hooks.begin(received, work, own)
        learner = sgd.start(optimizer_at(received.learning_rate), model, parts)
        if config.persistent:
            learner = learner._replace(opt_state=own[hooks.memory])
        others = {name: value for name, value in own.items() if name != hooks.memory}
        shapes = jax.eval_shape(first_loss, model, received, data, work, others)
        totals = dict.fromkeys(shapes.metrics, jnp.zeros(()))
        return Training(learner, others, totals, {name: jnp.zeros(sum.shape) for name, sum in shapes.sums.items()})

    def step(received: Broadcast, data: FederatedData, work, carry: Training, index, key) -> Training:
        batch, at = batch_at(data, work, index), At(received, data, work, carry.own, key, index)

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
        model = trained if hooks.send is None else hooks.send(received, work, trained, carry.totals)
        model = trained_parts(network, model, sent)
        if clip_norm:
            model = model._replace(params=clip_update(model.params, select(received.model.params, sent), clip_norm))
        metadata = {} if hooks.metadata is None else hooks.metadata(work, trained, carry.totals)
        upload = Upload(model, {**metadata, **carry.sums})
        means = jax.tree.map(lambda total: total / jnp.maximum(num_steps, 1), carry.totals)
        return Finished(upload, own, means)

    return Phase(prepare, start, step, finish)


def global_model(problem: Problem, state: State, extra: Any = ()) -> Broadcast:
    """The broadcast of the global model, this round's learning rate, and what else a method sends."""
    rate = learning_rate_at(problem.config, problem.config.client.learning_rate, state.round)
    return Broadcast(state.model, rate, extra)


def trained_models(received: Broadcast, previous: Previous) -> Model:
    """The whole model of each job after the phase before, leaves [M, ...]; of a job without one the received model."""
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
    """The entry of `State.clients` for persistent optimisers, every leaf [K, ...]; {} if they start afresh.

    With momentum this is one more model for each of the K clients, on the device and in every checkpoint.
    """
    config = problem.config
    if not config.client.persistent:
        return {}
    optimizer = make_optimizer(config.client, 0.0)
    opt_state = (optimizer if adapt is None else adapt(optimizer)).init(select(model.params, parts))
    return {memory: repeated(opt_state, len(data.ids))}
