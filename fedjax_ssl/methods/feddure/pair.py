"""The local model and the fine regulator (F-reg) of FedDure, and a step of both, F-reg first."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.client import At, Batch
from fedjax_ssl.engine import Images, Problem
from fedjax_ssl.learning.sgd import Model, make_optimizer
from fedjax_ssl.learning.trees import norm

PAIR = "pair"  # the entry of a client's memory while it trains: its local model and F-reg


class Pair(NamedTuple):
    """What a client has besides C-reg while it trains."""

    params: Any  # the local model's
    opt_state: Any
    regulator: dict[str, jax.Array]  # F-reg
    regulator_state: Any  # F-reg's optimizer state


def optimizers(problem: Problem, learning_rate: jax.Array):
    """The optimizers of the local model, `config.client`'s like that of C-reg, and of F-reg."""
    options = problem.config.feddure
    of_local = make_optimizer(problem.config.client, learning_rate)
    rise = risen(options.warm_up_steps + options.wait_steps, options.wait_steps)
    return optax.chain(of_local, optax.scale_by_schedule(rise)), optax.adam(options.fine_learning_rate)


def risen(steps: int, wait: int = 0):
    """A schedule: step i, from 0 -> factor of the learning rate, i / steps, at most 1; 0 for the first `wait` steps."""
    return lambda i: jnp.where(i < wait, 0.0, jnp.minimum(1.0, i / steps)) if steps else jnp.float32(1)


def taught(
    problem: Problem,
    model: Model,
    at: At,
    labelled: tuple[Images, Batch],
    unlabelled: tuple[Images, Batch],
    p: jax.Array,
) -> tuple[Pair, jax.Array]:
    """Takes a step of F-reg, then a step of the local model with F-reg's weights.

    Args:
        problem: the run.
        model: C-reg; only what the local model lacks is read.
        at: the loss's context.
        labelled, unlabelled: weak views, and their batch.
        p: float32 [B, C], C-reg's probabilities of the unlabelled images, which give their labels; no gradient.

    Returns:
        The pair after the step; and d, float32 [], the change of the local model's labelled loss.
    """
    options, pair, rate = problem.config.feddure, at.own[PAIR], at.received.learning_rate
    of_local, of_regulator = optimizers(problem, rate)

    def each(params, views: Images, labels: jax.Array, mask: jax.Array) -> jax.Array:
        """l_i in training mode, float32 [B]; 0 for padding."""
        (outputs,), _ = problem.network.train(model.with_parts(**params), (views,), mask)
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs.logits, jnp.where(mask, labels, 0))
        return jnp.where(mask, losses, 0.0)

    def labelled_loss(params) -> jax.Array:
        views, known = labelled
        return jnp.sum(each(params, views, known.labels, known.mask)) / jnp.maximum(jnp.sum(known.mask), 1)

    views, batch = unlabelled

    def taught_losses(params) -> jax.Array:
        return each(params, views, jnp.argmax(p, axis=-1), batch.mask)

    def shares_of(regulator) -> jax.Array:
        """m_i / sum_j m_j, float32 [B]."""
        weights = weights_of(regulator, p) if options.fine else jnp.ones(batch.mask.shape)
        weights = jnp.where(batch.mask, weights, 0.0)
        return weights / jnp.maximum(jnp.sum(weights), 1e-12)

    def slope(shares: jax.Array):
        return jax.grad(lambda params: jnp.sum(shares * taught_losses(params)))(pair.params)

    regulator, regulator_state = pair.regulator, pair.regulator_state
    if options.fine:
        ahead = jax.tree.map(lambda leaf, g: leaf - rate * g, pair.params, slope(shares_of(regulator)))
        # Derivative of the loss at `ahead` by an image's share: -rate <image's gradient, labelled gradient at `ahead`>.
        gains = -rate * slopes_along(taught_losses, pair.params, jax.grad(labelled_loss)(ahead))
        of_shares = jax.grad(lambda regulator: jnp.sum(gains * shares_of(regulator)))(regulator)
        updates, regulator_state = of_regulator.update(of_shares, regulator_state, regulator)
        regulator = optax.apply_updates(regulator, updates)
    updates, opt_state = of_local.update(slope(shares_of(regulator)), pair.opt_state, pair.params)
    params = optax.apply_updates(pair.params, updates)
    effect = labelled_loss(params) - labelled_loss(pair.params)
    if options.effect == "before_less_after":
        effect = -effect
    return jax.lax.stop_gradient((Pair(params, opt_state, regulator, regulator_state), effect))


def slopes_along(function: Callable[[Any], jax.Array], params: Any, direction: Any) -> jax.Array:
    """The directional derivative <gradient of f_i, direction> of each value f_i of a function, float32 [B].

    It is a central difference with steps of length 0.01 (as in DARTS, Liu et al., ICLR 2019). This needs no second
    derivative, which layers with a custom gradient do not have.
    """
    length = 0.01 / jnp.maximum(norm(direction), 1e-12)
    ends = [jax.tree.map(lambda leaf, d, h=h: leaf + h * d, params, direction) for h in (length, -length)]
    return (function(ends[0]) - function(ends[1])) / (2 * length)


def fresh_regulator(key: jax.Array, num_classes: int, hidden: int) -> dict[str, jax.Array]:
    """F-reg: C -> `hidden` -> 1, with PyTorch's initial values of linear layers."""
    keys = jax.random.split(key, 4)
    shapes = {"w1": (num_classes, hidden), "b1": (hidden,), "w2": (hidden,), "b2": ()}
    bounds = {"w1": num_classes, "b1": num_classes, "w2": hidden, "b2": hidden}
    return {
        name: jax.random.uniform(own, shape, minval=-1.0, maxval=1.0) / jnp.sqrt(bounds[name])
        for own, (name, shape) in zip(keys, shapes.items())
    }


def weights_of(regulator: dict[str, jax.Array], p: jax.Array) -> jax.Array:
    """sigmoid(w2 relu(w1 p + b1) + b2), float32 [B], of probabilities float32 [B, C]."""
    hidden = jax.nn.relu(jnp.matmul(p, regulator["w1"], precision="highest") + regulator["b1"])
    return jax.nn.sigmoid(jnp.matmul(hidden, regulator["w2"], precision="highest") + regulator["b2"])
