"""Compresses uploads: rounds updates to 8 bits, or keeps only their largest entries.

Each compression is a pure function of one client's update, the change of all parameters that it sends. Running
statistics and metadata are not compressed.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

INT8_LEVELS = 127  # levels on each side of 0
VALUE_BYTES, INDEX_BYTES, SCALE_BYTES = 4, 4, 4


def int8(update: dict[str, jax.Array], key: jax.Array, share: float) -> dict[str, jax.Array]:
    """Rounds the numbers x of each tensor to k max|x| / 127, with integers k from -127 to 127; random and unbiased.

    Source: Alistarh et al., QSGD, NeurIPS 2017, section 3.1, scaled by the largest number instead of the norm.
    """
    del share

    def rounded(key, leaf):
        scale = jnp.max(jnp.abs(leaf)) / INT8_LEVELS
        levels = jnp.floor(leaf / jnp.where(scale > 0, scale, 1) + jax.random.uniform(key, leaf.shape, leaf.dtype))
        return jnp.clip(levels, -INT8_LEVELS, INT8_LEVELS) * scale

    return {path: rounded(one, leaf) for one, (path, leaf) in zip(jax.random.split(key, len(update)), update.items())}


def top_k(update: dict[str, jax.Array], key: jax.Array, share: float) -> dict[str, jax.Array]:
    """Keeps the ceil(share d) of d numbers with the largest absolute values over all tensors; the others become 0.

    Source: Stich et al., Sparsified SGD with Memory, NeurIPS 2018, Definition 2.1.
    """
    del key
    flat, as_update = ravel_pytree(update)
    kept = jax.lax.top_k(jnp.abs(flat), num_kept(len(flat), share))[1]
    return as_update(jnp.zeros_like(flat).at[kept].set(flat[kept]))


COMPRESSIONS: dict[str, Callable[[dict[str, jax.Array], jax.Array, float], dict[str, jax.Array]]] = {
    "int8": int8,
    "top_k": top_k,
}


def num_kept(size: int, share: float) -> int:
    """k of `top_k`: ceil(share d), at least 1."""
    return max(1, math.ceil(share * size - 1e-6))


def remembers(options: Any) -> bool:
    """Whether a client keeps its compression error and adds it to its next update (error feedback).

    Source: Stich et al., NeurIPS 2018, Algorithm 1. Unbiased rounding needs no error feedback.
    """
    return options.kind == "top_k" and options.error_feedback


def compressed(
    options: Any, changes: dict[str, jax.Array], lost: dict[str, jax.Array] | None, keys: jax.Array
) -> tuple[dict[str, jax.Array], dict[str, jax.Array] | None]:
    """Compresses a cohort's updates, leaves [R, ...] by path, each with its own key.

    `lost` is each client's accumulated compression error of earlier rounds; None: no error feedback. Returns the
    updates as they arrive, and the new errors.
    """
    rule = COMPRESSIONS[options.kind]
    wanted = changes if lost is None else jax.tree.map(jnp.add, changes, lost)
    arrived = jax.vmap(lambda update, key: rule(update, key, options.share))(wanted, keys)
    return arrived, None if lost is None else jax.tree.map(jnp.subtract, wanted, arrived)


def compressed_bytes(options: Any, params: Any) -> int:
    """Bytes of a compressed update of parameters, as arrays or shapes."""
    leaves = jax.tree.leaves(params)
    size = sum(leaf.size for leaf in leaves)
    if options.kind == "int8":
        return size + SCALE_BYTES * len(leaves)
    return num_kept(size, options.share) * (VALUE_BYTES + INDEX_BYTES)
