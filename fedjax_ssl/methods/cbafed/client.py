"""Which labels of a client are accepted, depending on how frequent their class is over all clients (CBAFed)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

BASE, RARE = 0.84, 0.03  # of T_c; a class is rare if its P_c is below the second. Both as in the code


class Acceptance(NamedTuple):
    """The rule that accepts labels."""

    thresholds: jax.Array  # float32 [C], T_c, which a probability must exceed
    rare: jax.Array  # bool [C], the classes that an image may get as its second most likely class


def acceptance(counts: jax.Array, cap: float) -> Acceptance:
    """T_c = min(P_c + 0.84 - std(P), cap), P_c = n_c / sum n * C / 10: frequent classes have higher thresholds.

    The counts n_c, float32 [C], are the labels of each class, both given ones and pseudo-labels; std is the unbiased
    standard deviation over classes.
    """
    shares = counts / jnp.maximum(jnp.sum(counts), 1) * len(counts) / 10
    return Acceptance(jnp.minimum(shares + BASE - jnp.std(shares, ddof=1), cap), shares < RARE)


def accept(probabilities: jax.Array, by: Acceptance, second_labels: bool) -> tuple[jax.Array, jax.Array]:
    """The labels of predictions, float32 [..., C] -> int32 [...], and whether each is accepted, bool [...].

    With `second_labels` an image below its threshold may get its second most likely class if it is rare.
    """
    (best, _), (label, second) = (jnp.moveaxis(found, -1, 0) for found in jax.lax.top_k(probabilities, 2))
    confident = best > by.thresholds[label]
    takes_second = ~confident & by.rare[second] & second_labels
    return jnp.where(takes_second, second, label), confident | takes_second
