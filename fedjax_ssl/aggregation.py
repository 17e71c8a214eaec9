"""From stacked uploads to one model: who counts how much, and the weighted mean."""

from typing import Any

import jax
import jax.numpy as jnp

WEIGHTS = ("size", "qualified", "uniform")


def all_finite(tree: Any, batch_ndim: int = 0) -> jax.Array:
    """Whether every number of a pytree is finite: bool, of the leaves' first `batch_ndim` axes."""
    verdicts = [jnp.all(jnp.isfinite(leaf), axis=tuple(range(batch_ndim, leaf.ndim))) for leaf in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(verdicts), axis=0)


def client_weights(kind: str, sizes: jax.Array, num_qualified: jax.Array, accepted: jax.Array) -> jax.Array:
    """How much each upload counts, before normalisation.

    Args:
        kind: 'size', n_m the client's examples (FedAvg; FedAnchor's n_m / sum n_m); 'qualified', its examples
            with an accepted pseudo-label; 'uniform', one each (SemiFL).
        sizes: int32 [M].
        num_qualified: int32 [M].
        accepted: bool [M], whether there is an upload that counts at all.

    Returns:
        float32 [M], 0 where nothing was accepted.
    """
    by_kind = {"size": sizes, "qualified": num_qualified, "uniform": jnp.ones_like(sizes)}
    return jnp.where(accepted, by_kind[kind].astype(jnp.float32), 0.0)


def weighted_mean(uploads: Any, weights: jax.Array, otherwise: Any) -> Any:
    """sum_m w_m upload_m / sum_m w_m over the leading axis, FedAvg's aggregation.

    Args:
        uploads: a pytree, every leaf [M, ...]; a row of weight 0 may hold anything, non-finite numbers too.
        weights: float32 [M], not negative.
        otherwise: the pytree to return where all weights are 0.

    Returns:
        A pytree like `otherwise`.
    """
    total = jnp.sum(weights)
    shares = weights / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)

    def mean(stacked, fallback):
        column = (-1,) + (1,) * (stacked.ndim - 1)
        counted = jnp.where((weights > 0).reshape(column), stacked, 0)
        average = jnp.sum(counted * shares.reshape(column).astype(stacked.dtype), axis=0)
        return jnp.where(total > 0, average, fallback)

    return jax.tree.map(mean, uploads, otherwise)
