"""Batches of an epoch, and functions over many rows in chunks that fit into memory."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.base.devices import num_devices, on_each_device, platform

# On a CPU the intermediate values of a few rows stay in the caches. More rows are slower: what a convolution allocates
# above 32 MB is new memory at each call. A TPU's compiler takes half as long for 250 rows as for 500.
ROWS_AT_ONCE = {"cpu": 32, "tpu": 250}
MOST_ROWS = 500  # on other platforms
Count = TypeVar("Count", int, jax.Array)


def map_batches(function: Callable[[Any], Any], rows: Any, batch_size: int | None) -> Any:
    """Maps `function` over the leading axis of `rows`, at most `batch_size` rows at a time on each device.

    The function maps a pytree with leaves [B, ...] to one with leaves [B, ...], each row independent of the others.
    Pass indices instead of images as rows, leaves [n, ...], so that each chunk gathers its own. Without a batch size it
    is one that is fast on the platform.
    """
    count, devices = len(jax.tree.leaves(rows)[0]), num_devices()
    batch_size = batch_size or ROWS_AT_ONCE.get(platform(), MOST_ROWS)
    num_chunks = -(-count // (batch_size * devices)) * devices
    # Equal chunks, for the least padding; on a TPU full chunks, because passes of equal shapes are compiled once.
    chunk = batch_size if platform() == "tpu" and num_chunks > devices else -(-count // num_chunks)

    def to_chunks(leaf):
        padded = jnp.pad(leaf, [(0, num_chunks * chunk - count)] + [(0, 0)] * (leaf.ndim - 1), mode="edge")
        return padded.reshape(num_chunks, chunk, *leaf.shape[1:])

    results = on_each_device(lambda chunks: jax.lax.map(function, chunks), jax.tree.map(to_chunks, rows))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:count], results)


def epoch_orders(key: jax.Array, included: jax.Array, epochs: int, largest_size: jax.Array | None = None) -> jax.Array:
    """A random order of the included positions, bool [n], for each epoch; the other positions follow: int32 [E, n].

    Included positions are below `largest_size`; see `in_epochs`.
    """
    draws = in_epochs(jax.random.uniform(key, (epochs * len(included),)), epochs, largest_size)
    return jnp.argsort(jnp.where(included, draws, jnp.inf), axis=1)


def in_epochs(draws: jax.Array, epochs: int, largest_size: jax.Array | None = None) -> jax.Array:
    """Draws [E * n] as [E, n]: epoch e begins at draw e * `largest_size`, else e * n. So padding changes no epoch."""
    n = len(draws) // epochs
    begins = (n if largest_size is None else largest_size) * np.arange(epochs)[:, None]
    return draws[begins + np.arange(n)]


def draw_with_replacement(key: jax.Array, size: jax.Array | int, count: int) -> jax.Array:
    """Draws `count` positions from 0 to size - 1 with replacement: int32 [count]."""
    return jnp.minimum(jnp.floor(jax.random.uniform(key, (count,)) * size).astype(jnp.int32), size - 1)


def num_batches(count: Count, batch_size: int) -> Count:
    """The number of batches in an epoch over `count` examples, including a short last batch."""
    return -(-count // batch_size)


def batch_positions(batch: jax.Array, batch_size: int, count: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """The positions of batch number `batch` in a list of `count` entries, int32 [batch_size], and their mask.

    In a short last batch some positions are beyond the end.
    """
    positions = batch * batch_size + jnp.arange(batch_size)
    return positions, positions < count
