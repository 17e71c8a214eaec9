"""One step of stochastic gradient descent, the same for clients and server."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from fedjax_ssl.learning.trees import select


class Learner(NamedTuple):
    """What a training loop carries.

    Attributes:
        params: all parameters of the model, a dict by part ('backbone', 'classifier', 'anchor_head').
        batch_stats: the statistics of its normalisation layers.
        opt_state: of the parts that are trained, and of those only.
    """

    params: Any
    batch_stats: Any
    opt_state: Any


def make_optimizer(config, learning_rate) -> optax.GradientTransformation:
    """SGD as PyTorch's: gradient clipping, then weight decay added to the gradient, then momentum.

    Args:
        config: a section with `momentum`, `nesterov`, `weight_decay` and `clip_norm` (0: no clipping).
        learning_rate: a number or a traced scalar; it does not enter the optimiser's state.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        optax.add_decayed_weights(config.weight_decay),
        optax.trace(decay=config.momentum, nesterov=config.nesterov),
        optax.scale(-learning_rate),
    )


def start(optimizer: optax.GradientTransformation, params: Any, batch_stats: Any, parts: tuple[str, ...]):
    """A Learner that will train `parts` of `params`, with a fresh optimiser."""
    return Learner(params, batch_stats, optimizer.init(select(params, parts)))


def step(
    loss_fn: Callable, optimizer: optax.GradientTransformation, learner: Learner, parts: tuple[str, ...]
) -> tuple[Learner, dict[str, jax.Array]]:
    """One update of the named parts; the others take no gradient, no momentum and no weight decay.

    A head that a loss does not touch must not decay: PyTorch, on which the papers' figures rest, skips
    parameters without a gradient.

    Args:
        loss_fn: (params, batch_stats) -> (loss [], (batch_stats, metrics)).
        optimizer: whose state the learner holds.
        learner: before the step.
        parts: names of top-level entries of `params`.

    Returns:
        The learner after the step, and the metrics.
    """
    trained = select(learner.params, parts)

    def loss_of_trained(trained):
        return loss_fn({**learner.params, **trained}, learner.batch_stats)

    gradients, (batch_stats, metrics) = jax.grad(loss_of_trained, has_aux=True)(trained)
    updates, opt_state = optimizer.update(gradients, learner.opt_state, trained)
    params = {**learner.params, **optax.apply_updates(trained, updates)}
    return Learner(params, batch_stats, opt_state), metrics
