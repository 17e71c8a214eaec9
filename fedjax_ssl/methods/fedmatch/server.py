"""What each client uploaded last, and which clients are alike by what their models say about one image of noise."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.engine.interface import Received, WireBytes
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.learning.trees import tree_bytes
from fedjax_ssl.methods.fedmatch import sparse
from fedjax_ssl.models.network import Network

MEAN, DEVIATION = 125.0, 125.0  # of the noise, in the unit of pixels, 0 to 255


class Uploads(NamedTuple):
    """The server's memory of the clients' uploads."""

    params: dict[str, Any]  # parameters by part, leaves [K, ...]
    vectors: jax.Array  # float32 [K, D], of each client's model
    seen: jax.Array  # bool [K], whether a client has uploaded


def no_uploads(params: Mapping[str, Any], num_clients: int, size: int) -> Uploads:
    """Before the first round: room for these parameters, and vectors of D = `size` numbers, of each of K clients."""
    params = jax.tree.map(lambda leaf: jnp.zeros((num_clients, *leaf.shape), leaf.dtype), dict(params))
    return Uploads(params, jnp.zeros((num_clients, size)), jnp.zeros(num_clients, bool))


def remember_uploads(uploads: Uploads, received: Received, params: Mapping[str, Any], vectors: jax.Array) -> Uploads:
    """After a round: the accepted rows of `params`, leaves [R, ...], and of `vectors`, [R, D], replace the clients'."""
    place = jnp.where(received.accepted, received.clients, len(uploads.seen))  # beyond the end: dropped
    put = lambda table, rows: table.at[place].set(rows, mode="drop")  # noqa: E731
    new = {name: jax.tree.map(put, table, params[name]) for name, table in uploads.params.items()}
    return Uploads(new, put(uploads.vectors, vectors), put(uploads.seen, True))


def embed_models(network: Network, models: Model, image_shape: tuple[int, ...]) -> jax.Array:
    """The class probabilities that each of R models, leaves [R, ...], gives the noise image: float32 [R, C]."""
    noise = noise_image(image_shape)
    return jax.lax.map(lambda model: network.probabilities(model, noise)[0], models)


def noise_image(shape: tuple[int, ...]) -> jax.Array:
    """The same image in every run: normal noise, truncated to 0..255; float32 [1, ...]."""
    bounds = -MEAN / DEVIATION, (255.0 - MEAN) / DEVIATION
    return MEAN + DEVIATION * jax.random.truncated_normal(jax.random.key(0), *bounds, (1, *shape))


def nearest_clients(uploads: Uploads, clients: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """The clients whose vectors are nearest by Euclidean distance, oneself apart; of equal ones the first.

    Args:
        uploads: who has a vector.
        clients: int32 [M], who asks.
        number: H, less than K.

    Returns:
        int32 [M, H], the nearest first; and bool [M, H], False where there is none: for one without a vector, or where
        fewer others have one.
    """
    distances = jnp.linalg.norm(uploads.vectors[clients][:, None] - uploads.vectors[None], axis=-1)
    others = uploads.seen[None] & (jnp.arange(len(uploads.seen))[None] != clients[:, None])
    others &= uploads.seen[clients][:, None]
    nearness, near = jax.lax.top_k(-jnp.where(others, distances, jnp.inf), number)
    return near, jnp.isfinite(nearness)


ENTRIES = "entries"  # float32 [], of the message to one client alone, and of what an upload tells
VALUE_BYTES = 4  # of an entry


def changed_entries(new: Any, held: Any, least_change: float, smallest: Mapping[str, float]) -> jax.Array:
    """How many entries travel to clients that have an older version.

    Args:
        new: parameters by part, leaves [...].
        held: what each client has, leaves [M, ...].
        least_change: entries that differ by no more stay.
        smallest: by part, entries of this magnitude or less are taken for 0.

    Returns:
        float32 [M].
    """
    new = sparse.cut_parts(new, smallest)
    count = lambda old: sparse.count(sparse.differs(new, sparse.cut_parts(old, smallest), least_change))  # noqa: E731
    return jax.vmap(count)(held)


def new_entries(sent: Any, held: Any, least_change: float, smallest: float) -> jax.Array:
    """How many entries of other clients' parameters travel: those that are not 0, nor what a client has itself.

    Args:
        sent: the others' parameters, leaves [M, H, ...].
        held: the clients' own, leaves [M, ...].
        least_change, smallest: as in `changed_entries`.

    Returns:
        float32 [M, H].
    """

    def count(of_other, own):
        of_other, own = sparse.cut(of_other, smallest), sparse.cut(own, smallest)
        own = jax.tree.map(lambda theirs, mine: jnp.where(theirs != 0, mine, 0.0), of_other, own)
        return sparse.count(sparse.differs(of_other, own, least_change))

    return jax.vmap(jax.vmap(count, (0, None)))(sent, held)


def sparse_wire_bytes(index_bytes: int) -> WireBytes:
    """Bytes of messages that tell `ENTRIES`: their values, positions of `index_bytes` each, and whole statistics."""
    entry_bytes = VALUE_BYTES + index_bytes
    return WireBytes(
        down=lambda sent, own: entry_bytes * own[ENTRIES] + tree_bytes((sent.model.batch_stats, sent.learning_rate)),
        up=lambda upload: entry_bytes * upload.metadata[ENTRIES] + tree_bytes(upload.model.batch_stats),
    )
