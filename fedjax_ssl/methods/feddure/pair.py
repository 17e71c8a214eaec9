"""The local model and the fine regulator (F-reg) of FedDure, and a step of both, F-reg first."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.client import At, Batch
from fedjax_ssl.engine import Images, Problem
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import norm

PAIR = "pair"  # the entry of a client's memory while it trains: its local model and F-reg
HIDDEN, FINE_RATE = 100, 1e-3  # F-reg's hidden units, as in the code; and the learning rate of its Adam, our choice


class Pair(NamedTuple):
    """What a client has besides C-reg while it trains."""

    params: Any  # the local model's
    opt_state: Any
    regulator: dict[str, jax.Array]  # F-reg
    regulator_state: Any  # F-reg's optimizer state


def optimizers(problem: Problem, learning_rate: jax.Array):
    """The optimizers of the local model, the clients' like that of C-reg, and of F-reg."""
    options = problem.config.feddure
    of_local = problem.optimizer(learning_rate)
    rise = risen(options.warm_up_steps + options.wait_steps, options.wait_steps)
    return optax.chain(of_local, optax.scale_by_schedule(rise)), optax.adam(FINE_RATE)


def risen(steps: int, wait: int = 0):
    """A schedule: step i, from 0 -> factor of the learning rate, i / steps, at most 1; 0 for the first `wait` steps."""
    return lambda i: jnp.where(i < wait, 0.0, jnp.minimum(1.0, i / steps)) if steps else jnp.float32(1)


class Losses(NamedTuple):
    """The local model's losses on a step's images, as functions of its parameters; in training mode."""

    labelled: Callable[[Any], jax.Array]  # L_s, float32 []
    unlabelled: Callable[[Any], jax.Array]  # l_i towards C-reg's labels, float32 [B]; 0 for padding


def local_losses(
    problem: Problem, model: Model, labelled: tuple[Images, Batch], unlabelled: tuple[Images, Batch], p: jax.Array
) -> Losses:
    """The local model's losses on weak views `labelled` and `unlabelled`, each with its batch.

    C-reg is `model`, of which only what the local model lacks is read; its probabilities p of the unlabelled images,
    float32 [B, C] without gradient, give their labels.
    """

    def each(params, views: Images, labels: jax.Array, mask: jax.Array) -> jax.Array:
        (outputs,), _ = problem.network.train(model.with_parts(**params), (views,), mask)
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs.logits, jnp.where(mask, labels, 0))
        return jnp.where(mask, losses, 0.0)

    def of_labelled(params) -> jax.Array:
        views, known = labelled
        return jnp.sum(each(params, views, known.labels, known.mask)) / jnp.maximum(jnp.sum(known.mask), 1)

    def of_unlabelled(params) -> jax.Array:
        views, batch = unlabelled
        return each(params, views, jnp.argmax(p, axis=-1), batch.mask)

    return Losses(of_labelled, of_unlabelled)


def step_of_both(problem: Problem, at: At, losses: Losses, p: jax.Array, mask: jax.Array) -> tuple[Pair, jax.Array]:
    """A step of F-reg, then a step of the local model with F-reg's weights.

    `p` is C-reg's probabilities of the unlabelled images, float32 [B, C], without gradient; `mask`, bool [B], says
    which are present. Returns the pair after the step; and d, float32 [], the change of the labelled loss.
    """
    options, pair, rate = problem.config.feddure, at.own[PAIR], at.received.learning_rate
    of_local, of_regulator = optimizers(problem, rate)

    def shares_of(regulator) -> jax.Array:
        """m_i / sum_j m_j, float32 [B]."""
        weights = weights_of(regulator, p) if options.fine else jnp.ones(mask.shape)
        weights = jnp.where(mask, weights, 0.0)
        return weights / jnp.maximum(jnp.sum(weights), 1e-12)

    def slope(shares: jax.Array):
        """The gradient of L_u at the local model."""
        return jax.grad(lambda params: jnp.sum(shares * losses.unlabelled(params)))(pair.params)

    def fine_regulator_step():
        ahead = jax.tree.map(lambda leaf, g: leaf - rate * g, pair.params, slope(shares_of(pair.regulator)))
        # Derivative of the loss at `ahead` by an image's share: -rate <image's gradient, labelled gradient at `ahead`>.
        gains = -rate * slopes_along(losses.unlabelled, pair.params, jax.grad(losses.labelled)(ahead))
        of_shares = jax.grad(lambda regulator: jnp.sum(gains * shares_of(regulator)))(pair.regulator)
        updates, state = of_regulator.update(of_shares, pair.regulator_state, pair.regulator)
        return optax.apply_updates(pair.regulator, updates), state

    def local_step(regulator):
        updates, state = of_local.update(slope(shares_of(regulator)), pair.opt_state, pair.params)
        return optax.apply_updates(pair.params, updates), state

    def learning_effect(params) -> jax.Array:
        return losses.labelled(params) - losses.labelled(pair.params)

    regulator, regulator_state = fine_regulator_step() if options.fine else (pair.regulator, pair.regulator_state)
    params, opt_state = local_step(regulator)
    after = Pair(params, opt_state, regulator, regulator_state)
    return jax.lax.stop_gradient((after, learning_effect(params)))


def slopes_along(function: Callable[[Any], jax.Array], params: Any, direction: Any) -> jax.Array:
    """The directional derivative <gradient of f_i, direction> of each value f_i of a function, float32 [B].

    It is a central difference with steps of length 0.01 (as in DARTS, Liu et al., ICLR 2019). This needs no second
    derivative, which layers with a custom gradient do not have.
    """
    length = 0.01 / jnp.maximum(norm(direction), 1e-12)
    ends = [jax.tree.map(lambda leaf, d, h=h: leaf + h * d, params, direction) for h in (length, -length)]
    return (function(ends[0]) - function(ends[1])) / (2 * length)


def fresh_regulator(key: jax.Array, num_classes: int) -> dict[str, jax.Array]:
    """F-reg: C -> 100 -> 1, with PyTorch's initial values of linear layers."""
    keys = jax.random.split(key, 4)
    shapes = {"w1": (num_classes, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN,), "b2": ()}
    bounds = {"w1": num_classes, "b1": num_classes, "w2": HIDDEN, "b2": HIDDEN}
    return {
        name: jax.random.uniform(own, shape, minval=-1.0, maxval=1.0) / jnp.sqrt(bounds[name])
        for own, (name, shape) in zip(keys, shapes.items())
    }


def weights_of(regulator: dict[str, jax.Array], p: jax.Array) -> jax.Array:
    """sigmoid(w2 relu(w1 p + b1) + b2), float32 [B], of probabilities float32 [B, C]."""
    hidden = jax.nn.relu(jnp.matmul(p, regulator["w1"], precision="highest") + regulator["b1"])
    return jax.nn.sigmoid(jnp.matmul(hidden, regulator["w2"], precision="highest") + regulator["b2"])
