"""Sparse messages: only entries that differ between two versions by more than a bound are sent."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.ops.trees import add_up


def cut(tree: Any, smallest: float) -> Any:
    """Sets every entry of magnitude up to `smallest` to 0."""
    return jax.tree.map(lambda leaf: jnp.where(jnp.abs(leaf) <= smallest, 0, leaf), tree)


def cut_parts(params: Mapping[str, Any], smallest: Mapping[str, float]) -> dict[str, Any]:
    """`cut` for each part at its bound; parts that `smallest` does not name are unchanged."""
    return {name: cut(part, smallest[name]) if name in smallest else part for name, part in params.items()}


def differs(new: Any, old: Any, least_change: float) -> Any:
    """Whether each entry is sent, leaves bool: whether it differs by more than `least_change`."""
    return jax.tree.map(lambda a, b: jnp.abs(a - b) > least_change, new, old)


def count(tree: Any) -> jax.Array:
    """The number of True entries in a tree of bool: float32 [], exact up to 16 million."""
    return add_up(jnp.sum(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(tree))


def num_entries(tree: Any) -> float:
    """The number of entries in a tree."""
    return float(sum(leaf.size for leaf in jax.tree.leaves(tree)))
