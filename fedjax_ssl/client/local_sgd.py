"""A client's local SGD, the same whatever the method: where it starts, a step, and what it sends up."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.engine.interface import Finished, Problem, State, model_upload
from fedjax_ssl.learning import sgd
from fedjax_ssl.learning.losses import proximal_term
from fedjax_ssl.learning.schedule import learning_rate_at
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.learning.trees import select

OPT_STATE = "opt_state"  # the entry of a client's own state that a persistent optimiser has


class GlobalModel(NamedTuple):
    """What travels down to each client in FedAvg. Local training reads these names from any method's broadcast.

    Attributes:
        model: the global model.
        learning_rate: float32 [], of this round's local training.
    """

    model: Model
    learning_rate: jax.Array


class Training(NamedTuple):
    """What a local training loop carries.

    Attributes:
        learner: model and optimiser.
        metric_sums: float32 [] by name, sums over the steps so far.
    """

    learner: sgd.Learner
    metric_sums: dict[str, jax.Array]


def global_model(problem: Problem, state: State) -> GlobalModel:
    """The global model and this round's learning rate, on their way down."""
    rate = learning_rate_at(problem.config, problem.config.client.learning_rate, state.round)
    return GlobalModel(state.model, rate)


def own_optimizers(problem: Problem, params: Any, parts: tuple[str, ...]) -> dict[str, Any]:
    """The entry of `State.clients` for persistent optimisers, every leaf [K, ...]; nothing where they start afresh.

    With momentum this is one more model for each of the K clients, on the device and in every checkpoint.
    """
    config = problem.config
    if not config.client.persistent:
        return {}
    opt_state = sgd.make_optimizer(config.client, 0.0).init(select(params, parts))
    stacked = jax.tree.map(lambda leaf: jnp.zeros((config.num_clients, *leaf.shape), leaf.dtype), opt_state)
    return {OPT_STATE: stacked}


def start(config, broadcast: Any, states: dict[str, Any], parts: tuple[str, ...], metrics: tuple[str, ...]) -> Training:
    """Before the first step: the global model, with a fresh optimiser or the client's own from its last round.

    Args:
        config: the client's section.
        broadcast: has `model` and `learning_rate`.
        states: the client's own.
        parts: of the model that are trained.
        metrics: the names that the loss reports.
    """
    optimizer = sgd.make_optimizer(config, broadcast.learning_rate)
    learner = sgd.start(optimizer, broadcast.model, parts)
    if config.persistent:
        learner = learner._replace(opt_state=states[OPT_STATE])
    return Training(learner, dict.fromkeys(metrics, jnp.zeros(())))


def step(config, broadcast: Any, training: Training, loss_fn: Callable, parts: tuple[str, ...]) -> Training:
    """`step_and_found` with a loss that finds nothing: model -> (loss, (batch_stats, metrics))."""

    def nothing_found(model):
        loss, (batch_stats, metrics) = loss_fn(model)
        return loss, (batch_stats, metrics, ())

    return step_and_found(config, broadcast, training, nothing_found, parts)[0]


def step_and_found(
    config, broadcast: Any, training: Training, loss_fn: Callable, parts: tuple[str, ...]
) -> tuple[Training, Any]:
    """One step of SGD; with `config.proximal` FedProx's term holds the model near the one that came down.

    Args:
        config: the client's section.
        broadcast: what came down.
        training: before the step.
        loss_fn: model -> (loss [], (batch_stats, metrics, found)).
        parts: of the model that are trained.

    Returns:
        The training after the step, and what the loss found out on the way.
    """

    def whole_loss(model):
        loss, (batch_stats, metrics, found) = loss_fn(model)
        if config.proximal:
            term = proximal_term(select(model.params, parts), select(broadcast.model.params, parts))
            loss = loss + config.proximal * term
        return loss, (batch_stats, (metrics, found))

    optimizer = sgd.make_optimizer(config, broadcast.learning_rate)
    learner, (metrics, found) = sgd.step(whole_loss, optimizer, training.learner, parts)
    return Training(learner, jax.tree.map(jnp.add, training.metric_sums, metrics)), found


def finish(
    problem: Problem, training: Training, states: dict[str, Any], num_steps: jax.Array, parts: tuple[str, ...]
) -> Finished:
    """After the last step: the upload, the client's own state for its next round, and means over the steps.

    Args:
        problem: the run.
        training: what the steps made.
        states: the entries of the client's own state that the method's steps made, besides the optimiser's.
        num_steps: int32 [], at least 1.
        parts: of the model that are uploaded.
    """
    if problem.config.client.persistent:
        states = {**states, OPT_STATE: training.learner.opt_state}
    upload = model_upload(problem.network, training.learner.model, parts)
    return Finished(upload, states, jax.tree.map(lambda total: total / num_steps, training.metric_sums))
