"""Sparse messages: of two versions of some parameters only the entries that differ by more than a bound travel."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.learning.trees import add_up


def cut(tree: Any, smallest: float) -> Any:
    """Every entry of magnitude `smallest` or less becomes 0."""
    return jax.tree.map(lambda leaf: jnp.where(jnp.abs(leaf) <= smallest, 0, leaf), tree)


def cut_parts(params: Mapping[str, Any], smallest: Mapping[str, float]) -> dict[str, Any]:
    """The parts of parameters, each `cut` at its bound; one that `smallest` does not name is left as it is."""
    return {name: cut(part, smallest[name]) if name in smallest else part for name, part in params.items()}


def differs(new: Any, old: Any, least_change: float) -> Any:
    """Which entries travel, leaves bool: those that differ by more than `least_change`."""
    return jax.tree.map(lambda a, b: jnp.abs(a - b) > least_change, new, old)


def count(tree: Any) -> jax.Array:
    """How many entries of a tree of bool are True: float32 [], exact up to 16 million."""
    return add_up(jnp.sum(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(tree))


def num_entries(tree: Any) -> float:
    """How many entries a tree has."""
    return float(sum(leaf.size for leaf in jax.tree.leaves(tree)))
