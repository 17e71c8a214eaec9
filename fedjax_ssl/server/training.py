"""Training at the server: epochs over its labelled images. A server without images does not train."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fedjax_ssl.base.devices import platform
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import CLASSIFIER, Metrics, Problem, State
from fedjax_ssl.models import check_mixtures
from fedjax_ssl.ops import sgd
from fedjax_ssl.ops.augment.mixup import lambda_of, mix_inputs
from fedjax_ssl.ops.batches import batch_positions, draw_with_replacement
from fedjax_ssl.ops.losses import cross_entropy, mixup_cross_entropy
from fedjax_ssl.ops.schedule import learning_rate_at
from fedjax_ssl.ops.sgd import BatchStats, Model, make_optimizer
from fedjax_ssl.ops.trees import select
from fedjax_ssl.server.statistics import make_statistics

ServerLossResult = tuple[jax.Array, tuple[BatchStats, Metrics]]


class ServerLoss(Protocol):
    """(model, rows [B] of labelled images, labels [B], mask [B], key) -> (loss, (batch_stats, metrics)) of one step."""

    def __call__(
        self, model: Model, rows: jax.Array, labels: jax.Array, mask: jax.Array, key: jax.Array, /
    ) -> ServerLossResult: ...


MakeServerLoss = Callable[[Problem, FederatedData, str], ServerLoss]  # str: the augmentation, 'strong' or 'weak'


def train_on_server_labels(
    state: State,
    data: FederatedData,
    loss_fn: Callable[..., ServerLossResult],
    config,
    learning_rate: jax.Array | float,
    key: jax.Array,
    *,
    parts: tuple[str, ...],
    epochs: int,
    batch_size: int,
    memory: str | None = None,
    steps: int | None = None,
    shuffle: bool = True,
    after_step: Callable[[Model, Model, jax.Array], Model] | None = None,
    draw: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[State, Metrics]:
    """Trains the model by SGD on the server's labelled images, reshuffled in each epoch.

    Args:
        state: its model is trained.
        data: the federation's data.
        loss_fn: the loss of one step, a `ServerLoss`.
        config: the optimizer's section, see `sgd.make_optimizer`.
        learning_rate: float32 [].
        key: the PRNG key of this training.
        parts: names of the top-level entries of `params` to train.
        epochs: passes over the labelled images; with 0 epochs or 0 images the state is returned unchanged.
        batch_size: the last batch of an epoch may be short; its padding is masked.
        memory: the entry of `state.server` with the optimizer's state, made by `own_optimizer`. None, or no such
            entry: the optimizer starts afresh.
        steps: number of steps, which replaces `epochs`; None: `epochs` counts.
        shuffle: False: every training has the same order of examples.
        after_step: (model before, model after, step from 0) -> the model after a step, in which it may change parts
            that are not trained.
        draw: (a step's key) -> what `loss_fn` otherwise draws with this key by rejection sampling, whose loops slow
            down the steps of accelerators. On accelerators this is drawn for all steps before the first step, and
            passed to `loss_fn` as a further argument.

    Returns:
        The state with the trained model (and the optimizer's state in its entry), and the mean of each metric over the
        steps of the last epoch.
    """
    labelled = data.server_index
    if (epochs == 0 and steps is None) or len(labelled) == 0:
        return state, {}
    batch_size = min(batch_size, len(labelled))
    steps_per_epoch = -(-len(labelled) // batch_size)
    if steps is not None:
        epochs = -(-steps // steps_per_epoch)
    num_steps = epochs * steps_per_epoch if steps is None else steps
    shuffle_key, steps_key = jax.random.split(key)
    shuffle_key = shuffle_key if shuffle else jax.random.key(0)
    orders = jax.vmap(lambda k: jax.random.permutation(k, labelled))(jax.random.split(shuffle_key, epochs))
    optimizer = make_optimizer(config, learning_rate)

    def key_of(index):
        return jax.random.fold_in(steps_key, index)

    def step(learner, inputs):
        index, *drawn = inputs
        epoch, batch = jnp.divmod(index, steps_per_epoch)
        positions, mask = batch_positions(batch, batch_size, len(labelled))
        rows = orders[epoch, jnp.minimum(positions, len(labelled) - 1)]
        step_key = key_of(index)

        def loss_of_batch(model: Model):
            return loss_fn(model, rows, data.visible_labels[rows], mask, step_key, *drawn)

        after, metrics = sgd.step(loss_of_batch, optimizer, learner, parts)
        if after_step is not None:
            after = after._replace(model=after_step(learner.model, after.model, index))
        return after, metrics

    learner = sgd.start(optimizer, state.model, parts)
    remembers = memory in state.server
    if remembers:
        learner = learner._replace(opt_state=state.server[memory])
    indices = jnp.arange(num_steps)
    drawn = (jax.vmap(lambda index: draw(key_of(index)))(indices),) if draw and platform() != "cpu" else ()
    learner, metrics = jax.lax.scan(step, learner, (indices, *drawn))
    last_steps = jax.tree.map(lambda metric: jnp.mean(metric[-steps_per_epoch:]), metrics)
    server = {**state.server, memory: learner.opt_state} if remembers else state.server
    return state._replace(model=learner.model, server=server), last_steps


def own_optimizer(config, model: Model, parts: tuple[str, ...], memory: str) -> dict[str, Any]:
    """The optimizer's entry in `State.server` for one training at the server; {} if optimizers start afresh.

    Args:
        config: the server's section.
        model: the model whose parameters are trained.
        parts: the trained parts.
        memory: the entry's name.
    """
    return {memory: make_optimizer(config, 0.0).init(select(model.params, parts))} if config.persistent else {}


class ServerTask(NamedTuple):
    """One of several trainings at the server on its labelled images."""

    memory: str  # its optimizer's entry in `State.server`, see `own_optimizer`
    loss: Callable[[FederatedData], ServerLoss]  # makes the loss of its steps
    parts: tuple[str, ...]  # the trained parts
    batch_size: int  # examples per step
    draw: Callable[[jax.Array], jax.Array] | None = None  # see `train_on_server_labels`


def train_tasks(
    problem: Problem,
    state: State,
    data: FederatedData,
    key: jax.Array,
    trainings: tuple[ServerTask, ...],
    rates: Sequence[jax.Array | float],
    epochs: Sequence[int],
) -> tuple[State, Metrics]:
    """Runs several trainings in turn, all with the optimizer of `config.server`, each at its own learning rate.

    Args:
        problem: the run's `Problem`.
        state: its model is trained.
        data: the federation's data.
        key: the PRNG key of all trainings.
        trainings: the trainings, in order.
        rates, epochs: learning rate and number of epochs of each training.

    Returns:
        The state, and the metrics of all trainings; see `train_on_server_labels`.
    """
    metrics: Metrics = {}
    keys = jax.random.split(key, len(trainings))
    for training, rate, num_epochs, own_key in zip(trainings, rates, epochs, keys, strict=True):
        state, of_training = train_on_server_labels(
            state,
            data,
            training.loss(data),
            problem.config.server,
            rate,
            own_key,
            parts=training.parts,
            epochs=num_epochs,
            batch_size=training.batch_size,
            memory=training.memory,
            draw=training.draw,
        )
        metrics |= of_training
    return state, metrics


CLASSIFICATION = "classification"  # the optimizer's entry in `State.server` for training with cross-entropy


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
    return train_on_server_labels(
        state,
        data,
        (make_loss or supervised_loss)(problem, data, config.server.augmentation),
        config.server,
        learning_rate_at(config, config.server.learning_rate, state.round),
        key,
        parts=parts,
        epochs=config.server.epochs,
        batch_size=config.server.batch_size,
        memory=CLASSIFICATION,
    )


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
    config, (init_key, train_key) = problem.config, jax.random.split(key)
    model = problem.network.init(init_key)
    keeps = config.server.pretrain_persistent
    memory = own_optimizer(config.server, model, parts, CLASSIFICATION) if keeps else {}
    state = State(jnp.int32(0), model, memory)
    return train_on_server_labels(
        state,
        data,
        (make_loss or supervised_loss)(problem, data, config.server.augmentation),
        config.server,
        jnp.float32(config.server.pretrain_learning_rate),
        train_key,
        parts=parts,
        epochs=config.server.pretrain_epochs,
        batch_size=config.server.batch_size,
        memory=CLASSIFICATION,
    )[0]


def supervised_loss(problem: Problem, data: FederatedData, augmentation: str) -> ServerLoss:
    """Cross-entropy of the classification head on augmented labelled images: l(f(A(x)), y).

    Args:
        problem: the run's `Problem`.
        data: the federation's data.
        augmentation: 'strong' or 'weak'.

    Returns:
        The loss; its metric is `server_loss`.
    """
    augment = {"strong": problem.strong, "weak": problem.weak}[augmentation]

    def loss_fn(model: Model, rows: jax.Array, labels: jax.Array, mask: jax.Array, key: jax.Array) -> ServerLossResult:
        views = (augment(key, data.inputs[rows]),)
        (outputs,), batch_stats = problem.network.train(model, views, mask)
        loss = cross_entropy(outputs.logits, labels, mask)
        return loss, (batch_stats, {"server_loss": loss})

    return loss_fn


def supervised_mixup_loss(
    problem: Problem, data: FederatedData, augmentation: str, alpha: float, mix_weight: float
) -> ServerLoss:
    """The clients' fix and mix losses, on all of the server's images (FedAnchor's earlier version, section 3.5).

    Args:
        problem: the run's `Problem`.
        data: the federation's data.
        augmentation: the augmentation of the fix set, 'strong' or 'weak'.
        alpha: a in lambda ~ Beta(a, a), one lambda for each batch.
        mix_weight: b in L_fix + b L_mix, eq. 10.

    Returns:
        The loss. Its metrics are `server_loss` on the batch and `server_mix_loss` on mixtures of the batch with images
        drawn with replacement from all of the server's images.

    Raises:
        UserError: a user's backbone cannot take mixtures.
    """
    check_mixtures(problem.config.model.name, problem.network)
    augment = {"strong": problem.strong, "weak": problem.weak}[augmentation]

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


SERVER_MODEL = "model"  # the entry of the server's model in `State.server`


def add_server_model(state: State) -> State:
    """Adds an entry for the server's model to the state; it is the global model until it is trained."""
    return state._replace(server={**state.server, SERVER_MODEL: state.model})


def train_server_model(problem: Problem, state: State, data: FederatedData, key: jax.Array) -> tuple[State, Metrics]:
    """A stage that trains the server's model, starting from the global model, which stays unchanged (FedIL, eq. 22).

    Under the 'static' policy the server's model has the statistics of the server's images.
    """
    trained, metrics = train_classifier(problem, state, data, key)
    refresh = make_statistics(problem.network, problem.config.model, "server")
    trained = refresh(trained, data, jnp.zeros((0,), jnp.int32), key)
    return state._replace(server={**trained.server, SERVER_MODEL: trained.model}), metrics
