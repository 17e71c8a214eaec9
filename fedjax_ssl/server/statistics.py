"""The global normalisation statistics under the 'static' policy: whose images they are taken from."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.errors import UserError
from fedjax_ssl.learning.devices import num_devices, on_each_device
from fedjax_ssl.learning.sgd import BatchStats, Model
from fedjax_ssl.models.network import Network

BATCH_SIZE = 250  # rows in a batch of the statistics pass, as in SemiFL
SOURCES = ("server", "cohort", "all", "all_mixed")
WEIGHTS = ("batches", "samples")  # of the batches in their mean


class Sums(NamedTuple):
    """What an owner of images tells of them: the sums of its batches' statistics, and what these count together.

    Attributes:
        total: the sum over the batches of each one's statistics times its count.
        count: float32 [], the sum of the counts.
    """

    total: BatchStats
    count: jax.Array


def make_statistics(network: Network, source: str, weights: str = "batches") -> Callable:
    """The `statistics` stage of a method.

    Args:
        network: the stage does nothing unless its policy is 'static'. With `network.gathered`, the `Sums` that clients
            sent, the stage reads the server's images alone.
        source: one of `SOURCES`. 'server', the anchors alone; 'cohort', the anchors and this round's clients; 'all',
            the anchors and every client, in separate batches; 'all_mixed', the same images as one pool, which
            is what SemiFL's code does (with the privacy caveat of its paper).
        weights: see `mean_statistics`.

    Returns:
        (state, data, clients int32 [M], key) -> state.

    Raises:
        UserError: when the stage is traced: the server has no images.
    """
    if network.normalisation != "static":
        return lambda state, data, clients, key: state

    def refresh(state, data: FederatedData, clients, key):
        del key
        owners = [(data.anchor_index[None], jnp.array([len(data.anchor_index)]))]
        if len(data.anchor_index) == 0:
            if source == "server":
                raise UserError(
                    "model.statistics='server' takes images of the server, which has none where data.labels is not "
                    "'server'; known: cohort, all, all_mixed, or model.normalisation='running'"
                )
            owners = []
        asked = asked_clients(source, len(data.anchor_index), clients, len(data.client_size))
        if network.gathered is None and source == "all_mixed":
            owners = [pool(data)]
        elif network.gathered is None and asked is not None:
            owners.append((data.client_index[asked], data.client_size[asked]))
        told = [] if network.gathered is None else [network.gathered]
        if owners:
            told.append(sum_statistics(network, state.model, data.images, *batches_of(owners), weights))
        return state._replace(model=state.model._replace(batch_stats=mean_of_sums(told)))

    return refresh


def asked_clients(source: str, num_anchors: int, cohort: jax.Array, num_clients: int) -> jax.Array | None:
    """The clients whose images are asked for statistics, int32 [n]; None: no client is.

    Before the first round there is no cohort: a server with images uses those, another asks all clients.
    """
    if source == "all" or (source == "cohort" and not num_anchors and len(cohort) == 0):
        return jnp.arange(num_clients)
    return cohort if source == "cohort" else None


def num_exchanging(network: Network, source: str, clients_per_round: int, num_clients: int) -> int:
    """How many clients take part in the second exchange of a round, the one that gathers statistics."""
    if network.normalisation != "static":
        return 0
    return {"server": 0, "cohort": clients_per_round, "all": num_clients, "all_mixed": num_clients}[source]


def pool(data: FederatedData) -> tuple[jax.Array, jax.Array]:
    """The images of the server and of all clients as one pool, in the order of the image table.

    Returns:
        int32 [1, n] rows, padded, n the largest possible number; and int32 [1], their number.
    """
    num_rows, (num_clients, n_max) = len(data.images), data.client_index.shape
    owned = data.at_clients.at[data.anchor_index].set(True)
    rows = jnp.nonzero(owned, size=min(num_rows, len(data.anchor_index) + num_clients * n_max), fill_value=0)[0]
    return rows[None], jnp.sum(owned)[None]


def cut_into_batches(rows: jax.Array, sizes: jax.Array, batch_size: int) -> tuple[jax.Array, jax.Array]:
    """Cuts each owner's rows into batches; owners never share one.

    Args:
        rows: int32 [K, n_max], each owner's rows, padded beyond its size.
        sizes: int32 [K].
        batch_size: B.

    Returns:
        int32 [K * ceil(n_max / B), B] rows, and bool of that shape, which of them are present.
    """
    padding = -rows.shape[1] % batch_size
    present = jnp.arange(rows.shape[1] + padding) < sizes[:, None]
    return jnp.pad(rows, ((0, 0), (0, padding))).reshape(-1, batch_size), present.reshape(-1, batch_size)


def batches_of(owners: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """The batches of all owners, see `cut_into_batches`; each of `owners` is a pair of its rows and sizes."""
    size = min(BATCH_SIZE, max(rows.shape[1] for rows, _ in owners))
    cut = [cut_into_batches(rows, sizes, size) for rows, sizes in owners]
    batches, masks = (jnp.concatenate(parts) for parts in zip(*cut))
    return batches, masks


def mean_statistics(
    network: Network,
    model: Model,
    images: jax.Array,
    batches: jax.Array,
    masks: jax.Array,
    weights: str = "batches",
) -> BatchStats:
    """SemiFL's static batch normalisation (its section 3.3): one pass in training mode, without augmentation.

    The statistics are the mean over the batches of their means and of their unbiased variances; a short batch counts
    as much as a full one, or as the images that it has.

    Args:
        network: the architecture.
        model: its parameters; its statistics are not read.
        images: uint8 [N, H, W, C], the flat table.
        batches: int32 [n, B] rows.
        masks: bool [n, B]; an empty batch is left out.
        weights: one of `WEIGHTS`: what a batch that is not empty counts, 1 or its images.

    Returns:
        The statistics.
    """
    return mean_of_sums([sum_statistics(network, model, images, batches, masks, weights)])


def sum_statistics(
    network: Network, model: Model, images: jax.Array, batches: jax.Array, masks: jax.Array, weights: str
) -> Sums:
    """The sums of which `mean_statistics` is the quotient, with the same arguments: what one owner of images tells."""
    counts = jnp.sum(masks, axis=1) if weights == "samples" else jnp.any(masks, axis=1)

    def add(total, batch):
        rows, mask, count = batch
        statistics = network.batch_statistics(model, images[rows], mask)
        return jax.tree.map(lambda t, new: t + jnp.where(count > 0, count * new, 0), total, statistics), None

    def sums(batches):
        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, model.batch_stats), batches)
        return jax.tree.map(lambda leaf: leaf[None], total)

    # Every device takes as many batches; those that are added have no image.
    missing = -len(counts) % num_devices()
    even = jax.tree.map(
        lambda leaf: jnp.pad(leaf, [(0, missing)] + [(0, 0)] * (leaf.ndim - 1)), (batches, masks, counts)
    )
    of_devices = on_each_device(sums, even)
    return Sums(jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), of_devices), jnp.sum(counts))


def mean_of_sums(told: list[Sums]) -> BatchStats:
    """The statistics of all images together."""
    total, count = jax.tree.map(lambda *sums: sum(sums[1:], sums[0]), *told)
    return jax.tree.map(lambda leaf: leaf / jnp.maximum(count, 1), total)
