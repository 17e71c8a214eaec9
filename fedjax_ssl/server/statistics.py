"""The global normalisation statistics under the 'static' policy, from whose images they come."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import State, Statistics
from fedjax_ssl.errors import UserError
from fedjax_ssl.fields import Section
from fedjax_ssl.learning.devices import num_devices, on_each_device
from fedjax_ssl.learning.sgd import BatchStats, Model
from fedjax_ssl.models.network import Network

BATCH_SIZE = 250  # rows in a batch of the statistics pass, as in SemiFL
SOURCES = ("server", "cohort", "all", "all_mixed", "moments")
WEIGHTS = ("batches", "samples")  # of the batches in their mean


class Sums(NamedTuple):
    """What an owner of images reports: the sums of its batches' statistics, and the sum of their weights."""

    # The sum over the batches of each one's statistics, or under 'moments' of its moments, times its count.
    total: BatchStats
    # float32 [], the sum of the counts.
    count: jax.Array  # type: ignore[assignment]  # tuple.count is never asked for


def make_statistics(network: Network, section: Section, source: str | None = None) -> Statistics:
    """The `statistics` stage of a method.

    Under 'moments' owners tell the moments of each layer's input, in evaluation mode, about the current statistics'
    means; the new statistics are those of all images together, by the law of total variance. A layer's input depends
    on the statistics of the layers below, so the exchange is repeated: after k passes the first k layers are exact, up
    to float32's rounding, whatever the statistics were before. Every image counts alike.

    Args:
        network: the stage does nothing unless its policy is 'static'. With `network.gathered`, the `Sums` that clients
            sent, the stage reads the server's images alone, and makes one pass.
        section: `config.model`, of which the fields that begin with `statistics` are read.
        source: one of `SOURCES`; None: `section.statistics`. 'server', its labelled images alone; 'cohort', these and
            this round's clients; 'all', these and every client, in separate batches; 'all_mixed', the same
            images as one pool, which is what SemiFL's code does (with the privacy caveat of its paper); 'moments',
            the server's and every client's, with the variance between them.

    Raises:
        UserError: when the stage is traced: the server has no images.
    """
    if network.normalisation != "static":
        return lambda state, data, clients, key: state
    source = source or section.statistics

    def refresh(state: State, data: FederatedData, clients: jax.Array, key: jax.Array) -> State:
        del key
        owners = [(data.server_index[None], jnp.array([len(data.server_index)]))]
        if len(data.server_index) == 0:
            if source == "server":
                raise UserError(
                    "model.statistics='server' takes images of the server, which has none where data.labels is not "
                    "'server'; known: cohort, all, all_mixed, moments, or model.normalisation='running'"
                )
            owners = []
        asked = asked_clients(source, len(data.server_index), clients, len(data.client_size))
        if network.gathered is None and source == "all_mixed":
            owners = [pool(data)]
        elif network.gathered is None and asked is not None:
            rows = data.rows_of(asked) if asked is clients else data.all_rows(f"model.statistics={source!r}")
            owners.append((rows, data.client_size[asked]))
        batches = batches_of(owners) if owners else None
        told = [] if network.gathered is None else [network.gathered]
        moments = source == "moments"

        def one_pass(model: Model) -> Model:
            own = []
            if batches is not None:
                own = [sum_statistics(network, model, data.inputs, *batches, section.statistics_weights, moments)]
            found, some = mean_of_sums(told + own), sum(one.count for one in told + own) > 0
            found = network.pooled_statistics(model, found) if moments else found
            # Where nobody with images answers they stay as they are.
            return model._replace(batch_stats=jax.tree.map(lambda *of: jnp.where(some, *of), found, model.batch_stats))

        if not moments or told:
            return state._replace(model=one_pass(state.model))
        passes = num_passes(network, section.statistics_passes, state.model, before=len(clients) == 0)
        return state._replace(model=jax.lax.fori_loop(0, passes, lambda _, model: one_pass(model), state.model))

    return refresh


def num_passes(network: Network, passes: int, model: Model, before: bool = False) -> int:
    """Passes of the exchange under 'moments': `passes`, but no more than there are layers, after which all are exact.

    Args:
        network: its companions' layers do not count.
        passes: `config.model.statistics_passes`.
        model: shapes are enough.
        before: the first round, where no statistics are close to the model's: as many as there are layers.
    """
    own = {name: part for name, part in model.batch_stats.items() if name not in network.companions}
    layers = len(jax.tree.leaves(own)) // 2  # each has a mean and a variance
    return layers if before else min(passes, layers)


def asked_clients(source: str, server_labels: int, cohort: jax.Array, num_clients: int) -> jax.Array | None:
    """The clients that are asked for statistics of their images, int32 [n]; None: no client.

    Before the first round there is no cohort: a server with images uses those, another asks all clients.
    """
    if source in ("all", "moments") or (source == "cohort" and not server_labels and len(cohort) == 0):
        return jnp.arange(num_clients)
    return cohort if source == "cohort" else None


def num_exchanging(network: Network, source: str, clients_per_round: int, num_clients: int) -> int:
    """How many clients take part in the second exchange of a round, the one that gathers statistics."""
    if network.normalisation != "static":
        return 0
    return {"server": 0, "cohort": clients_per_round}.get(source, num_clients)


def pool(data: FederatedData) -> tuple[jax.Array, jax.Array]:
    """The images of the server and of all clients as one pool, in the order of the image table.

    Returns:
        int32 [1, n] rows, padded, n the largest possible number; and int32 [1], their number.
    """
    owned = data.at_clients("model.statistics='all_mixed'").at[data.server_index].set(True)
    most = len(data.server_index) + data.client_index.size
    rows = jnp.nonzero(owned, size=min(len(data.inputs), most), fill_value=0)[0]
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


def sum_statistics(
    network: Network,
    model: Model,
    images: jax.Array,
    batches: jax.Array,
    masks: jax.Array,
    weights: str = "batches",
    moments: bool = False,
) -> Sums:
    """What one owner of images reports: SemiFL's static batch normalisation (its section 3.3), or moments of inputs.

    SemiFL's statistics are the mean over the batches of their means and of their unbiased variances, in one pass in
    training mode without augmentation; a short batch counts as much as a full one, or as the images that it has.

    Args:
        network: the architecture.
        model: its parameters; its statistics are read under `moments` alone.
        images: uint8 [N, H, W, C], the flat table.
        batches: int32 [n, B] rows.
        masks: bool [n, B]; an empty batch is left out.
        weights: one of `WEIGHTS`: what a batch that is not empty counts, 1 or its images. Under `moments`: its images.
        moments: whether to tell `Network.input_moments` in place of the batches' statistics.
    """
    counts = jnp.sum(masks, axis=1) if moments or weights == "samples" else jnp.any(masks, axis=1)
    of_batch = network.input_moments if moments else network.batch_statistics

    def add(total, batch):
        rows, mask, count = batch
        statistics = of_batch(model, images[rows], mask)
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
    """The mean of what all owners reported; 0 where they have no images."""
    total, count = jax.tree.map(lambda *sums: sum(sums[1:], sums[0]), *told)
    return jax.tree.map(lambda leaf: leaf / jnp.maximum(count, 1), total)
