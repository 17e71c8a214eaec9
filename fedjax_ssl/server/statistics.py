"""The global normalisation statistics under the 'static' policy, and the images that they are computed from."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.base.devices import num_devices, on_each_device
from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.fields import Section
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import State, Statistics
from fedjax_ssl.models.network import Network
from fedjax_ssl.ops.sgd import BatchStats, Model
from fedjax_ssl.ops.trees import column, without
from fedjax_ssl.server.aggregation import mean_statistics

BATCH_SIZE = 250  # rows in a batch of the statistics pass, as in SemiFL
SOURCES = ("server", "cohort", "all", "all_mixed", "moments")
INSTEAD = "model.normalisation='running' or 'group'"  # settings that read no client's images
WEIGHTS = ("batches", "samples")  # weights of the batches in their mean


class Sums(NamedTuple):
    """What owners of images (clients, the server) report: a weighted sum of each one's batches' statistics."""

    # Of each owner the sum over its batches of weight * statistics, or with 'moments' of weight * moments: [R, ...].
    total: BatchStats
    # float32 or int32 [R], each owner's sum of the weights.
    count: jax.Array  # type: ignore[assignment]  # tuple.count is not used


def make_statistics(network: Network, config: Section, source: str | None = None) -> Statistics:
    """Makes the `statistics` stage of a method, which does nothing unless the normalisation policy is 'static'.

    The source is one of `SOURCES`; None: `model.statistics`. 'server': only the server's labelled images. 'cohort':
    these and the images of this round's clients. 'all': these and all clients' images, in separate batches.
    'all_mixed': the same images as one pool, as in SemiFL's code (its paper notes the privacy caveat). 'moments': the
    same images by the moments of each layer's input, in evaluation mode, about the current means. The new statistics
    are then those of all images together, by the law of total variance, and every image has the same weight. A layer's
    input depends on the statistics of the layers below, so the exchange is repeated: after k passes the first k layers
    are exact up to float32 rounding, whatever the statistics were before.

    With a robust `aggregation.mean` what clients report goes through it as well, each client with its own mean; the
    server, which does not lie, has its weight in the mean of both. With `network.gathered`, the `Sums` that clients
    sent, the stage reads only the server's images and makes one pass. When it is traced it raises a UserError if the
    server has no images, and the source is 'server'.
    """
    if network.normalisation != "static":
        return lambda state, data, clients, key: state
    section, options = config.model, config.aggregation
    source = source or section.statistics

    def refresh(state: State, data: FederatedData, clients: jax.Array, key: jax.Array) -> State:
        server, of_clients = [(data.server_index[None], jnp.array([len(data.server_index)]))], []
        if len(data.server_index) == 0:
            if source == "server":
                raise UserError(
                    "model.statistics='server' takes images of the server, which has none here (data.labels); "
                    "known: cohort, all, all_mixed, moments, or model.normalisation='running'"
                )
            server = []
        asked = asked_clients(source, len(data.server_index), clients, len(data.client_size))
        if network.gathered is None and source == "all_mixed":
            server = [pool(data)]
        elif network.gathered is None and asked is not None and len(asked):
            reader = f"model.statistics={source!r}" + (" before the first round" if source == "cohort" else "")
            rows = data.rows_of(asked) if asked is clients else data.all_rows(reader, INSTEAD)
            of_clients = [(rows, data.client_size[asked])]
        moments, robust = source == "moments", options.mean != "mean"
        # Clients' sums are kept apart only for a robust mean.
        parts = (
            [(server, 1), (of_clients, 0 if asked is None else len(asked))] if robust else [(server + of_clients, 1)]
        )
        cut = [(batches_of(owners), number) for owners, number in parts if owners]

        def one_pass(model: Model) -> Model:
            how = section.statistics_weights, moments
            told = [sum_statistics(network, model, data.inputs, *batches, *how, number) for batches, number in cut]
            told += [] if network.gathered is None else [network.gathered]
            if robust and (of_clients or network.gathered is not None):
                told[-1] = _by_robust_mean(told[-1], model.batch_stats, options)
            found, some = mean_of_sums(told), sum(jnp.sum(one.count) for one in told) > 0
            found = network.pooled_statistics(model, found) if moments else found
            # If no owner of images answers, the statistics stay as they are.
            return model._replace(batch_stats=jax.tree.map(lambda *of: jnp.where(some, *of), found, model.batch_stats))

        if not moments or network.gathered is not None:
            return state._replace(model=one_pass(state.model))
        passes = num_passes(network, section.statistics_passes, state.model, before=len(clients) == 0)
        return state._replace(model=jax.lax.fori_loop(0, passes, lambda _, model: one_pass(model), state.model))

    return refresh


def _by_robust_mean(told: Sums, old: BatchStats, options: Section) -> Sums:
    """What clients told, [R, ...], as the sum of one owner: the robust mean of theirs, with the weight of all."""
    means = jax.tree.map(lambda leaf: leaf / column(jnp.maximum(told.count, 1), leaf), told.total)
    found = mean_statistics(options.mean, means, told.count.astype(jnp.float32), old, options.byzantine_share)
    count = jnp.sum(told.count)[None]
    return Sums(jax.tree.map(lambda leaf: count[0] * leaf[None], found), count)


def num_passes(network: Network, passes: int, model: Model, before: bool = False) -> int:
    """The number of passes with 'moments': `passes`, but at most one per layer, after which all layers are exact.

    Before the first round statistics are not yet close: then it is one pass per layer. The layers of companions do not
    count. Of the model only shapes are read.
    """
    own = without(model.batch_stats, *network.companions)
    layers = len(jax.tree.leaves(own)) // 2  # each has a mean and a variance
    return layers if before else min(passes, layers)


def asked_clients(source: str, server_labels: int, cohort: jax.Array, num_clients: int) -> jax.Array | None:
    """The clients that report statistics of their images, int32 [n]; None: no client.

    With 'cohort' there is no cohort before the first round: then only the server's images are used, or if it has none,
    all clients report.
    """
    if source in ("all", "moments") or (source == "cohort" and not server_labels and len(cohort) == 0):
        return jnp.arange(num_clients)
    return cohort if source == "cohort" else None


def num_exchanging(network: Network, source: str, clients_per_round: int, num_clients: int) -> int:
    """The number of clients in the second exchange of a round, which gathers statistics."""
    if network.normalisation != "static":
        return 0
    return {"server": 0, "cohort": clients_per_round}.get(source, num_clients)


def pool(data: FederatedData) -> tuple[jax.Array, jax.Array]:
    """The images of the server and all clients as one pool: rows, int32 [1, n], padded; and their number, int32 [1]."""
    owned = data.at_clients("model.statistics='all_mixed'", INSTEAD).at[data.server_index].set(True)
    most = len(data.server_index) + data.client_index.size
    rows = jnp.nonzero(owned, size=min(len(data.inputs), most), fill_value=0)[0]
    return rows[None], jnp.sum(owned)[None]


def batches_of(owners: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """Cuts the rows of all owners into batches of one size, each with rows of a single owner.

    `owners` are pairs of rows, int32 [K, n_max], and sizes, int32 [K], beyond which rows are padding. Returns the
    batches' rows, int32 [n, B], and their mask, bool [n, B].
    """
    size = min(BATCH_SIZE, max(rows.shape[1] for rows, _ in owners))
    batches, masks = [], []
    for rows, sizes in owners:
        padding = -rows.shape[1] % size
        masks.append((jnp.arange(rows.shape[1] + padding) < sizes[:, None]).reshape(-1, size))
        batches.append(jnp.pad(rows, ((0, 0), (0, padding))).reshape(-1, size))
    return jnp.concatenate(batches), jnp.concatenate(masks)


def sum_statistics(
    network: Network,
    model: Model,
    images: jax.Array,
    batches: jax.Array,
    masks: jax.Array,
    weights: str = "batches",
    moments: bool = False,
    num_owners: int = 1,
) -> Sums:
    """Sums the statistics of batches: SemiFL's static batch normalisation (section 3.3), or moments of layers' inputs.

    SemiFL's statistics are the mean over batches of their means and unbiased variances, from one forward pass in
    training mode without augmentation. With `moments` they are `Network.input_moments`.

    Batches are rows of the image table, int32 [n, B], with masks, bool [n, B]; an empty batch is left out. A batch has
    the weight 1 ('batches'), or its number of images ('samples', and always with `moments`). The sums of R owners are
    kept apart; each has as many of the batches, one owner after the other.
    """
    counts = jnp.sum(masks, axis=1) if moments or weights == "samples" else jnp.any(masks, axis=1)
    of_batch = network.input_moments if moments else network.batch_statistics

    owner = jnp.arange(len(counts)) // (len(counts) // num_owners)
    zeros = jax.tree.map(lambda leaf: jnp.zeros((num_owners, *leaf.shape), leaf.dtype), model.batch_stats)

    def add(total, batch):
        rows, mask, count, whose = batch
        statistics = of_batch(model, images[rows], mask)
        return jax.tree.map(
            lambda t, new: t.at[whose].add(jnp.where(count > 0, count * new, 0)), total, statistics
        ), None

    def sums(batches):
        total, _ = jax.lax.scan(add, zeros, batches)
        return jax.tree.map(lambda leaf: leaf[None], total)

    # Every device takes the same number of batches; the batches that are added for this are empty.
    missing = -len(counts) % num_devices()
    even = jax.tree.map(
        lambda leaf: jnp.pad(leaf, [(0, missing)] + [(0, 0)] * (leaf.ndim - 1)), (batches, masks, counts, owner)
    )
    of_devices = on_each_device(sums, even)
    counts = jnp.sum(counts.reshape(num_owners, -1), axis=1)
    return Sums(jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), of_devices), counts)


def mean_of_sums(told: list[Sums]) -> BatchStats:
    """The weighted mean of what all owners reported; 0 if they have no images."""
    total, count = jax.tree.map(lambda *sums: sum(jnp.sum(each, axis=0) for each in sums), *told)
    return jax.tree.map(lambda leaf: leaf / jnp.maximum(count, 1), total)
