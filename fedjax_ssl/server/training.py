"""Training at the server: epochs over its labelled images. A server without images does not train."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.base.devices import platform
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import CLASSIFIER, Metrics, Problem, State
from fedjax_ssl.ops import sgd
from fedjax_ssl.ops.augment.mixup import lambda_of, mix_inputs
from fedjax_ssl.ops.batches import batch_positions, draw_with_replacement
from fedjax_ssl.ops.losses import cross_entropy, mixup_cross_entropy
from fedjax_ssl.ops.schedule import learning_rate_at
from fedjax_ssl.ops.sgd import BatchStats, Model, make_optimizer
from fedjax_ssl.ops.trees import select
from fedjax_ssl.server.statistics import make_statistics

CLASSIFICATION = "classification"  # the optimizer's entry in `State.server` for training with cross-entropy
SERVER_MODEL = "model"  # the entry of the server's model in `State.server`
ServerLossResult = tuple[jax.Array, tuple[BatchStats, Metrics]]
# (model, rows [B] of labelled images, labels [B], mask [B], key) -> (loss, (batch_stats, metrics)) of one step.
ServerLoss = Callable[[Model, jax.Array, jax.Array, jax.Array, jax.Array], ServerLossResult]
MakeServerLoss = Callable[[Problem, FederatedData], ServerLoss]


class ServerPlan(NamedTuple):
    """One training of a model by SGD on the server's labelled images, reshuffled in each epoch."""

    loss: Callable[..., ServerLossResult]  # of one step, a `ServerLoss`
    epochs: int  # passes over the labelled images; 0: no training
    parts: tuple[str, ...] = CLASSIFIER  # the trained parts of the model
    batch_size: int | None = None  # images in a step; the last batch of an epoch may be short. None: the server's
    # The entry of `State.server` with the optimizer's state, see `own_optimizer`. None, or if there is no such entry:
    # the optimizer starts afresh.
    memory: str | None = CLASSIFICATION
    steps: int | None = None  # number of steps, which replaces `epochs`
    # (model before, model after, step from 0) -> the model after a step, which may change parts that are not trained.
    after_step: Callable[[Model, Model, jax.Array], Model] | None = None
    # (a step's key) -> what `loss` otherwise draws with this key by rejection sampling, whose loops slow down the steps
    # of accelerators. There it is drawn for all steps before the first step, and is a further argument of `loss`.
    draw: Callable[[jax.Array], jax.Array] | None = None


def train_on_server_labels(
    problem: Problem, state: State, data: FederatedData, key: jax.Array, rate: jax.Array | float, plan: ServerPlan
) -> tuple[State, Metrics]:
    """Trains the state's model as planned, with the optimizer of `config.server` at the learning rate `rate`.

    Returns the state with the trained model (and the optimizer's state in its entry), and the mean of each metric over
    the steps of the last epoch. Without steps or images the state is returned unchanged.
    """
    labelled, config = data.server_index, problem.config.server
    batch_size = min(plan.batch_size or config.batch_size, len(labelled))
    steps_per_epoch = -(-len(labelled) // max(batch_size, 1))
    num_steps = plan.epochs * steps_per_epoch if plan.steps is None else plan.steps
    if num_steps == 0 or len(labelled) == 0:
        return state, {}
    shuffle_key, steps_key = jax.random.split(key)
    epoch_keys = jax.random.split(shuffle_key, -(-num_steps // steps_per_epoch))
    orders = jax.vmap(lambda k: jax.random.permutation(k, labelled))(epoch_keys)
    optimizer = make_optimizer(config, rate)

    def key_of(index):
        return jax.random.fold_in(steps_key, index)

    def step(learner, inputs):
        index, *drawn = inputs
        epoch, batch = jnp.divmod(index, steps_per_epoch)
        positions, mask = batch_positions(batch, batch_size, len(labelled))
        rows = orders[epoch, jnp.minimum(positions, len(labelled) - 1)]

        def loss_of_batch(model: Model):
            return plan.loss(model, rows, data.visible_labels[rows], mask, key_of(index), *drawn)

        after, metrics = sgd.step(loss_of_batch, optimizer, learner, plan.parts)
        if plan.after_step is not None:
            after = after._replace(model=plan.after_step(learner.model, after.model, index))
        return after, metrics

    learner = sgd.start(optimizer, state.model, plan.parts)
    remembers = plan.memory in state.server
    if remembers:
        learner = learner._replace(opt_state=state.server[plan.memory])
    indices = jnp.arange(num_steps)
    ahead = plan.draw is not None and platform() != "cpu"
    drawn = (jax.vmap(lambda index: plan.draw(key_of(index)))(indices),) if ahead else ()
    learner, metrics = jax.lax.scan(step, learner, (indices, *drawn))
    last_steps = jax.tree.map(lambda metric: jnp.mean(metric[-steps_per_epoch:]), metrics)
    server = {**state.server, plan.memory: learner.opt_state} if remembers else state.server
    return state._replace(model=learner.model, server=server), last_steps


def own_optimizer(
    problem: Problem, model: Model, parts: tuple[str, ...] = CLASSIFIER, memory: str = CLASSIFICATION
) -> dict[str, Any]:
    """The entry `memory` of `State.server` for the optimizer of these parts; {} if optimizers start afresh."""
    config = problem.config.server
    return {memory: make_optimizer(config, 0.0).init(select(model.params, parts))} if config.persistent else {}


def train_classifier(
    problem: Problem,
    state: State,
    data: FederatedData,
    key: jax.Array,
    make_loss: MakeServerLoss | None = None,
    parts: tuple[str, ...] = CLASSIFIER,
) -> tuple[State, Metrics]:
    """Trains the server's epochs of a round, by default with cross-entropy, whose metric is `server_loss`."""
    config = problem.config
    plan = ServerPlan((make_loss or supervised_loss)(problem, data), config.server.epochs, parts)
    rate = learning_rate_at(config, config.server.learning_rate, state.round)
    return train_on_server_labels(problem, state, data, key, rate, plan)


def pretrained_classifier(
    problem: Problem,
    data: FederatedData,
    key: jax.Array,
    make_loss: MakeServerLoss | None = None,
    parts: tuple[str, ...] = CLASSIFIER,
) -> State:
    """The first state: a new model, trained on the server's labels for `server.pretrain_epochs`.

    The default loss is cross-entropy. With `server.pretrain_persistent` the entry `CLASSIFICATION` of the state keeps
    the optimizer's state.
    """
    config, (init_key, train_key) = problem.config.server, jax.random.split(key)
    model = problem.network.init(init_key)
    memory = own_optimizer(problem, model, parts) if config.pretrain_persistent else {}
    plan = ServerPlan((make_loss or supervised_loss)(problem, data), config.pretrain_epochs, parts)
    rate, state = jnp.float32(config.pretrain_learning_rate), State(jnp.int32(0), model, memory)
    return train_on_server_labels(problem, state, data, train_key, rate, plan)[0]


def supervised_loss(problem: Problem, data: FederatedData) -> ServerLoss:
    """Cross-entropy on labelled images with `server.augmentation`: l(f(A(x)), y). Its metric is `server_loss`."""
    augment = {"strong": problem.strong, "weak": problem.weak}[problem.config.server.augmentation]

    def loss_fn(model: Model, rows: jax.Array, labels: jax.Array, mask: jax.Array, key: jax.Array) -> ServerLossResult:
        (outputs,), batch_stats = problem.network.train(model, (augment(key, data.inputs[rows]),), mask)
        loss = cross_entropy(outputs.logits, labels, mask)
        return loss, (batch_stats, {"server_loss": loss})

    return loss_fn


def supervised_mixup_loss(problem: Problem, data: FederatedData, alpha: float, mix_weight: float) -> ServerLoss:
    """The clients' fix and mix losses, on all of the server's images (FedAnchor's earlier version, section 3.5).

    a is `alpha` in lambda ~ Beta(a, a), one for each batch; b is `mix_weight` in L_fix + b L_mix, eq. 10. The fix set
    has `server.augmentation`. Metrics are `server_loss` on the batch and `server_mix_loss` on mixtures of the batch
    with images drawn with replacement from all of the server's images.
    """
    augment = {"strong": problem.strong, "weak": problem.weak}[problem.config.server.augmentation]

    def loss_fn(
        model: Model,
        rows: jax.Array,
        labels: jax.Array,
        mask: jax.Array,
        key: jax.Array,
        mixing: jax.Array | None = None,
    ) -> ServerLossResult:
        augment_key, partner_key, mix_key = jax.random.split(key, 3)
        labelled = data.server_index
        partners = labelled[draw_with_replacement(partner_key, len(labelled), len(rows))]
        images = data.inputs[rows]
        others, kind = data.inputs[partners], problem.network.inputs
        mixture, mixing = mix_inputs(kind, problem.weak, mix_key, images, others, alpha, "mix_then_augment", mixing)
        views = (augment(augment_key, images), mixture)
        outputs, batch_stats = problem.network.train(model, views, mask)
        fix_loss = cross_entropy(outputs[0].logits, labels, mask)
        mix_loss = mixup_cross_entropy(outputs[1].logits, labels, data.visible_labels[partners], mixing, mask)
        metrics = {"server_loss": fix_loss, "server_mix_loss": mix_loss}
        return fix_loss + mix_weight * mix_loss, (batch_stats, metrics)

    return loss_fn


def server_lambda(key: jax.Array, alpha: float) -> jax.Array:
    """The lambda that a step of `supervised_mixup_loss` draws with its key, float32 []."""
    return lambda_of(jax.random.split(key, 3)[2], alpha)


def train_server_model(problem: Problem, state: State, data: FederatedData, key: jax.Array) -> tuple[State, Metrics]:
    """A stage that trains the server's model, starting from the global model, which stays unchanged (FedIL, eq. 22).

    Under the 'static' policy the server's model has the statistics of the server's images.
    """
    trained, metrics = train_classifier(problem, state, data, key)
    refresh = make_statistics(problem.network, problem.config, "server")
    trained = refresh(trained, data, jnp.zeros((0,), jnp.int32), key)
    return state._replace(server={**trained.server, SERVER_MODEL: trained.model}), metrics
