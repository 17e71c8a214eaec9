"""A learning rate that falls where a loss has stopped falling (Serra et al., 2018, as FedMatch has it)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

DIVISOR = 3.0  # of the learning rate
LEAST = 1e-17  # the factor does not fall below it: 1e-20 of FedMatch's learning rate


class Plateau(NamedTuple):
    """What the rule remembers."""

    factor: jax.Array  # float32 [], of the learning rate
    lowest: jax.Array  # float32 [], the lowest loss so far; before the first one the largest finite number
    waited: jax.Array  # int32 [], epochs since the lowest loss, or since the last fall of the rate


def fresh_plateau(shape: tuple[int, ...] = ()) -> Plateau:
    """Before the first epoch; leaves of this shape."""
    return Plateau(jnp.ones(shape), jnp.full(shape, jnp.finfo(jnp.float32).max), jnp.zeros(shape, jnp.int32))


def after_epoch(plateau: Plateau, loss: jax.Array, patience: int) -> Plateau:
    """The rule after an epoch with this loss: a third of the rate after `patience` epochs without a new minimum."""
    waited = jnp.where(loss < plateau.lowest, 0, plateau.waited + 1)
    falls = waited >= patience
    factor = jnp.where(falls, jnp.maximum(plateau.factor / DIVISOR, LEAST), plateau.factor)
    return Plateau(factor, jnp.minimum(plateau.lowest, loss), jnp.where(falls, 0, waited))
