"""Which clients are similar, by their models' outputs for one noise image; and the sizes of sparse messages."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fedjax_ssl.engine.interface import WireBytes
from fedjax_ssl.methods.fedmatch.phases import count, cut, cut_psi, differs
from fedjax_ssl.ops.trees import tree_bytes, zeros_unless

MEAN, DEVIATION = 125.0, 125.0  # of the noise, in pixel values from 0 to 255


class Vectors(NamedTuple):
    """The outputs of the clients' last uploads for the noise image."""

    outputs: jax.Array  # float32 [K, D], class probabilities by each client's model
    seen: jax.Array  # bool [K], whether a client has uploaded


def noise_image(shape: tuple[int, ...]) -> jax.Array:
    """The noise image, the same in every run: normal noise clipped to 0..255; float32 [1, ...]."""
    bounds = -MEAN / DEVIATION, (255.0 - MEAN) / DEVIATION
    return MEAN + DEVIATION * jax.random.truncated_normal(jax.random.key(0), *bounds, (1, *shape))


def nearest_clients(vectors: Vectors, clients: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """The H clients with the nearest vectors by Euclidean distance, excluding the client itself; ties by number.

    H is less than K. Returns int32 [M, H], nearest first; and bool [M, H], False for missing neighbours: one of both
    has no vector.
    """
    outputs, seen = vectors
    distances = jnp.linalg.norm(outputs[clients][:, None] - outputs[None], axis=-1)
    others = seen[None] & (jnp.arange(len(seen))[None] != clients[:, None])
    others &= seen[clients][:, None]
    nearness, near = jax.lax.top_k(-jnp.where(others, distances, jnp.inf), number)
    return near, jnp.isfinite(nearness)


ENTRIES = "entries"  # float32 [], in messages to single clients and in metadata of uploads
VALUE_BYTES = 4  # of an entry


def entries_sent(options: ConfigDict, parts: Mapping[str, Any], held: Any, seen: jax.Array) -> jax.Array:
    """The number of entries of sigma and psi that are sent to each client, float32 [M]: all to one that never uploaded.

    With `sparse_down` an entry is sent if it differs from the client's last upload, `held`, leaves [M, ...]; `seen`,
    bool [M], says whether a client has uploaded.
    """
    whole = float(sum(leaf.size for leaf in jax.tree.leaves(parts)))
    if not options.sparse_down:
        return jnp.full(len(seen), whole)
    new = cut_psi(parts, options.smallest)

    def changed(old):
        return count(differs(new, cut_psi(old, options.smallest), options.least_change))

    return jnp.where(seen, jax.vmap(changed)(held), whole)


def entries_of_helpers(options: ConfigDict, helpers: Any, present: jax.Array, held: Any) -> jax.Array:
    """The number of entries of helpers' psi that are sent to each client, float32 [M]: those not 0 that it lacks.

    Helpers have leaves [M, H, ...]; those that are present, bool [M, H], are sent. `held` is the clients' own psi,
    leaves [M, ...].
    """

    def lacking(of_other, own):
        of_other, own = cut(of_other, options.smallest), cut(own, options.smallest)
        own = jax.tree.map(lambda theirs, mine: jnp.where(theirs != 0, mine, 0.0), of_other, own)
        return count(differs(of_other, own, options.least_change))

    each = zeros_unless(jnp.any(present), lambda: jax.vmap(jax.vmap(lacking, (0, None)))(helpers, held))
    return jnp.sum(jnp.where(present, each, 0.0), axis=1)


# Of messages with `ENTRIES`: their values, without positions as in the paper, and complete statistics.
SPARSE_WIRE_BYTES = WireBytes(
    down=lambda sent, own: VALUE_BYTES * own[ENTRIES] + tree_bytes((sent.model.batch_stats, sent.learning_rate)),
    up=lambda upload: VALUE_BYTES * upload.metadata[ENTRIES] + tree_bytes(upload.model.batch_stats),
)
