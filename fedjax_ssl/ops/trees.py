"""Arithmetic of pytrees: norms, cosines, rows, bytes."""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.base.errors import UserError, known_are

# The error of a method that cannot use a backbone without parameters, such as 'linear'.
WITHOUT_PARAMETERS = "clients of this method train the backbone above all, which has no parameter; take another one"
SMALL = 4096  # leaves with fewer numbers (per row, if they are stacked) are joined


def all_finite(tree: Any, batch_ndim: int = 0) -> jax.Array:
    """Whether every number of a pytree is finite: bool, shaped like the leaves' first `batch_ndim` axes."""
    leaves = small_joined(jax.tree.leaves(tree), batch_ndim)
    verdicts = [jnp.all(jnp.isfinite(leaf), axis=tuple(range(batch_ndim, leaf.ndim))) for leaf in leaves]
    return jnp.all(jnp.stack(verdicts), axis=0)


def small_joined(leaves: Iterable[jax.Array], batch_ndim: int = 0) -> list[jax.Array]:
    """Joins all small leaves of a dtype into one array; large leaves stay unchanged.

    It is for functions that do not depend on the leaves' shapes, but for their first `batch_ndim` axes. Two thirds of a
    deep network's leaves are scales, biases and statistics, and compilation time grows with the number of operations,
    even of small ones.
    """
    joined: list[jax.Array] = []
    small: dict[Any, list[jax.Array]] = {}
    for leaf in leaves:
        if math.prod(leaf.shape[batch_ndim:]) < SMALL:
            small.setdefault(leaf.dtype, []).append(leaf.reshape(*leaf.shape[:batch_ndim], -1))
        else:
            joined.append(leaf)
    return joined + [jnp.concatenate(group, axis=-1) for group in small.values()]


def add_up(terms: Iterable[jax.Array]) -> jax.Array:
    """The sum of at least one array, in order."""
    return functools.reduce(operator.add, terms)


def cosines(updates: Any, direction: Any) -> jax.Array:
    """Cosine similarity of each update, leaves [M, ...], to one direction, leaves [...]; 0 if either is zero.

    All parameters are one vector (FedIL eq. 26). Products do not overflow for finite numbers.
    """
    updates, direction = _scaled(updates, 1)[0], _scaled(direction, 0)[0]
    products = jax.tree.map(
        lambda update, one: jnp.sum(update * one, axis=tuple(range(1, update.ndim))), updates, direction
    )
    lengths = row_norms(updates) * norm(direction)
    return jnp.where(lengths > 0, sum(jax.tree.leaves(products)) / jnp.where(lengths > 0, lengths, 1.0), 0.0)


def norm(tree: Any) -> jax.Array:
    """Euclidean length of a pytree as one vector: float32 []. Squares do not overflow."""
    leaves, scale = _scaled(small_joined(jax.tree.leaves(tree)), 0)
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in leaves)) / scale


def row_norms(tree: Any, near: jax.Array | None = None) -> jax.Array:
    """Euclidean length of each row of a stacked pytree, leaves [M, ...], all leaves as one vector: float32 [M].

    Each row is scaled by its largest magnitude, or by `near`, float32 [M], if that is given. It must be about as large:
    numbers below 1e-19 of it count as 0.
    """
    leaves, scale = _scaled(small_joined(jax.tree.leaves(tree), 1), 1, near)
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf), axis=tuple(range(1, leaf.ndim))) for leaf in leaves)) / scale


def largest(tree: Any, batch_ndim: int) -> jax.Array:
    """The largest magnitude in a pytree with leaves, float32 [], or in each of its rows, [M], if batch_ndim is 1."""
    found = [jnp.max(jnp.abs(leaf), axis=tuple(range(batch_ndim, leaf.ndim))) for leaf in jax.tree.leaves(tree)]
    return jnp.max(jnp.stack(found), axis=0).astype(jnp.float32)


def _scaled(tree: Any, batch_ndim: int, near: jax.Array | None = None) -> tuple[Any, jax.Array]:
    """A pytree times a power of two that brings its largest number near 1, and this power; by row if batch_ndim is 1.

    Powers of two are exact, so that lengths are bit-identical to those without scaling unless these overflow.
    """
    if not jax.tree.leaves(tree):
        return tree, jnp.float32(1)
    exponent = jnp.frexp(largest(tree, batch_ndim) if near is None else near)[1]
    scale = jnp.ldexp(jnp.float32(1), -jnp.clip(exponent, -100, 126))  # a normal number
    return jax.tree.map(lambda leaf: leaf * (column(scale, leaf) if batch_ndim else scale), tree), scale


def column(values: jax.Array, like: jax.Array) -> jax.Array:
    """[M] reshaped to [M, 1, ...], to broadcast with a stacked leaf."""
    return values.reshape((-1,) + (1,) * (like.ndim - 1))


def weighted_sum(weights: jax.Array, stacked: jax.Array) -> jax.Array:
    """sum_m w_m x_m of a finite stacked leaf [M, ...]: [...].

    It is a matrix product, because XLA's CPU backend compiles the plain sum into code whose time grows quadratically
    with the size.
    """
    return jnp.tensordot(weights.astype(stacked.dtype), stacked, 1, precision="highest")


def where(condition: jax.Array, yes: Any, no: Any) -> Any:
    """`jnp.where` for each leaf with one condition, bool []."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def zeros_unless(condition: jax.Array, function: Callable[[], Any]) -> Any:
    """The function's result if the condition, bool [], holds, else zeros without computing the function."""
    zeros = lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function))  # noqa: E731
    return jax.lax.cond(condition, function, zeros)


def select(params: dict[str, Any], parts: tuple[str, ...]) -> dict[str, Any]:
    """The named parts of a model's parameters; raises a UserError if there is no such part."""
    for name in parts:
        if name not in params:
            raise UserError(f"the model has no part {name!r}{known_are(name, params)}")
    return {name: params[name] for name in parts}


def without(entries: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The entries that are not named."""
    return {name: entry for name, entry in entries.items() if name not in names}


def row(tree: Any, index: Any) -> Any:
    """Every leaf at `index` of its leading axis."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def with_rows(tree: Any, place: jax.Array, new: Any, counted: jax.Array) -> Any:
    """The pytree whose rows at `place`, int32 [n], are the new ones, leaves [n, ...], that count, bool [n]."""
    place = jnp.where(counted, place, jnp.iinfo(jnp.int32).max)  # out of bounds: dropped
    return jax.tree.map(lambda leaf, rows: leaf.at[place].set(rows, mode="drop"), tree, new)


def repeated(tree: Any, number: int) -> Any:
    """A pytree repeated as `number` rows, leaves [number, ...]."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (number, *jnp.shape(leaf))), tree)


def tree_bytes(tree: Any) -> int:
    """Bytes of a pytree's leaves (arrays or shapes)."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def where_rows(chosen: jax.Array, new: Any, old: Any) -> Any:
    """For each row of each leaf, `new` if the row is chosen, bool [], [M] or [G, M], else `old`."""
    at = lambda leaf: chosen.reshape(chosen.shape + (1,) * (leaf.ndim - chosen.ndim))  # noqa: E731
    return jax.tree.map(lambda one, other: jnp.where(at(one), one, other), new, old)


def moving_average(old: Any, new: Any, decay: jax.Array | float) -> Any:
    """decay old + (1 - decay) new for each leaf."""
    return jax.tree.map(lambda a, b: decay * a + (1 - decay) * b, old, new)


def clip_update(new: Any, old: Any, max_norm: float) -> Any:
    """Shortens an update, all leaves as one vector: old + (new - old) min(1, max_norm / |new - old|)."""
    update = jax.tree.map(jnp.subtract, new, old)
    factor = jnp.minimum(1.0, max_norm / jnp.maximum(norm(update), jnp.finfo(jnp.float32).tiny))
    return jax.tree.map(lambda change, start: start + change * factor, update, old)
