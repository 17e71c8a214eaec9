"""Which labels of a client count, by how frequent their class is among all clients' labels (CBAFed)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Acceptance(NamedTuple):
    """What decides about a label."""

    thresholds: jax.Array  # float32 [C], T_c, which a probability must exceed
    rare: jax.Array  # bool [C], which classes an image may have for its second one


def acceptance(counts: jax.Array, base: float, cap: float, rare: float) -> Acceptance:
    """T_c = min(P_c + base - std(P), cap), P_c = n_c / sum n * C / 10: a frequent class must be predicted more surely.

    Args:
        counts: float32 [C], n_c, the labels of each class, given and made.
        base, cap: of the thresholds; std is the unbiased one over classes.
        rare: a class is rare whose P_c is below this.
    """
    shares = counts / jnp.maximum(jnp.sum(counts), 1) * len(counts) / 10
    return Acceptance(jnp.minimum(shares + base - jnp.std(shares, ddof=1), cap), shares < rare)


def accept(probabilities: jax.Array, by: Acceptance, second_labels: bool) -> tuple[jax.Array, jax.Array]:
    """The labels of predictions, and which of them count.

    Args:
        probabilities: float32 [..., C].
        by: what decides.
        second_labels: whether an image that falls short may have its second class, if that one is rare.

    Returns:
        int32 [...] and bool [...].
    """
    (best, _), (label, second) = (jnp.moveaxis(found, -1, 0) for found in jax.lax.top_k(probabilities, 2))
    confident = best > by.thresholds[label]
    takes_second = ~confident & by.rare[second] & second_labels
    return jnp.where(takes_second, second, label), confident | takes_second
