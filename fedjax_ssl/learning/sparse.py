"""Sparse messages: of two versions of some parameters only the entries that differ by more than a bound travel."""

from typing import Any

import jax
import jax.numpy as jnp


def cut(tree: Any, least: float) -> Any:
    """Every entry of magnitude `least` or less becomes 0."""
    return jax.tree.map(lambda leaf: jnp.where(jnp.abs(leaf) <= least, 0, leaf), tree)


def differs(new: Any, old: Any, least: float) -> Any:
    """Which entries travel, leaves bool: those that differ by more than `least`."""
    return jax.tree.map(lambda a, b: jnp.abs(a - b) > least, new, old)


def count(tree: Any) -> jax.Array:
    """How many entries are not 0: float32 [], exact to 16 million entries a leaf."""
    return sum(jnp.sum(leaf != 0).astype(jnp.float32) for leaf in jax.tree.leaves(tree))
