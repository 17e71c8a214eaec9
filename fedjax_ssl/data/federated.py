"""The data of a federation as device arrays: images stored once, and who owns them as tables of rows."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data.owners import Partition
from fedjax_ssl.data.poison import poison
from fedjax_ssl.data.sources import Dataset
from fedjax_ssl.data.table import image_table, table_shape
from fedjax_ssl.errors import UserError

ATTACKERS = 100  # its number among the draws of a seed, apart from those of the partition


class FederatedData(NamedTuple):
    """Everything a method may see, on the device for the whole run.

    Per-example state of a method is a flat [N] array, independent of who owns an example.
    """

    # [N, ...], every training example once, as it is stored: images are uint8 [N, H, W, C], see `image_table`.
    inputs: jax.Array
    # int32 [N], the labels of the server's images and of the clients' labelled examples, -1 wherever a label is hidden,
    # as are those of validation images.
    visible_labels: jax.Array
    # int32 [K', n_max], rows of `inputs` of the clients `ids`, padded with 0 beyond their size. Methods ask `rows_of`.
    client_index: jax.Array
    client_size: jax.Array  # int32 [K], number of examples of each client, possibly 0
    labelled_size: jax.Array  # int32 [K], how many of them have a visible label
    server_index: jax.Array  # int32 [S], rows of `inputs` that the server holds; S may be 0
    # int32 [V], rows of `inputs` that nobody holds: to measure a model each round. V may be 0.
    validation_index: jax.Array
    test_inputs: jax.Array  # [T, ...], likewise
    test_labels: jax.Array  # int32 [T]
    seed: jax.Array  # uint32 [], the run's seed; data and not a constant, so that another seed needs no compilation
    byzantine: jax.Array | None = None  # bool [K], which clients attack, see `config.attack`; None: nobody does
    # bool [N], the images whose clients tell false labels of them: pseudo-labels are the next class's, and so are
    # visible labels already; None: nobody does.
    mislabelled: jax.Array | None = None
    # int32 [T], rows of the images that attackers want labelled as a class of theirs; None: they craft none.
    targets: jax.Array | None = None
    # int32 [K'], increasing: the clients whose rows and memory are here. None: all K. See `config.residence`.
    here: jax.Array | None = None
    # float32 [C], how many labels of each class clients were given, where the rows of all are not here; else None.
    given_labels: jax.Array | None = None

    @property
    def width(self) -> int:
        """n_max: the examples of a client, at most."""
        return self.client_index.shape[-1]

    @property
    def ids(self) -> jax.Array:
        """int32 [K'], the clients whose rows and memory are here, usually all K. Their memory is in this order."""
        return jnp.arange(len(self.client_size), dtype=jnp.int32) if self.here is None else self.here

    def place(self, clients: jax.Array) -> jax.Array:
        """Where the memory of some clients is among that of `ids`: int32 of the same shape."""
        return clients if self.here is None else jnp.searchsorted(self.here, clients)

    def rows_of(self, clients: jax.Array) -> jax.Array:
        """Rows of `inputs` of some clients, int32 [M, n_max]; those beyond `client_size` mean nothing."""
        return self.client_index[self.place(clients)]

    def all_rows(self, reader: str) -> jax.Array:
        """Rows of `inputs` of all clients, int32 [K, n_max].

        Args:
            reader: what reads them, for the error.

        Raises:
            UserError: when it is traced: only the clients of a round are here.
        """
        if self.here is not None:
            raise UserError(
                f"{reader} reads the images of all clients at once, and this federation keeps only a round's on the "
                "device; see docs/how_to/large_federations.md"
            )
        return self.client_index

    def at_clients(self, reader: str) -> jax.Array:
        """bool [N], which rows of `inputs` a client holds; see `all_rows`."""
        rows = self.all_rows(reader)
        present = jnp.arange(self.width) < self.client_size[:, None]
        return jnp.zeros(len(self.inputs), bool).at[rows].max(present)


_SHARED = ("inputs", "test_inputs", "test_labels")
# Which arrays differ between the seeds of one run, as `jax.vmap` takes it; all seeds share one copy of the images.
SEED_AXES: Any = FederatedData._make(None if name in _SHARED else 0 for name in FederatedData._fields)


def seed_axes(data: FederatedData) -> Any:
    """`SEED_AXES` of stacked federations: images differ as well where attackers have crafted some of them."""
    return SEED_AXES._replace(inputs=0 if data.inputs.ndim == 5 else None)


def stack_seeds(federations: list[FederatedData]) -> FederatedData:
    """The federations of several seeds as one, stacked where they differ (see `SEED_AXES`)."""
    axes = SEED_AXES._replace(inputs=None if federations[0].targets is None else 0)
    leaves = [
        federations[0][place]
        if axis is None or federations[0][place] is None
        else jax.tree.map(lambda *of: jnp.stack(of), *(federation[place] for federation in federations))
        for place, axis in enumerate(axes)
    ]
    return FederatedData._make(leaves)


class Holdings(NamedTuple):
    """A federation on the host: its images once, who owns them, and which labels are visible."""

    inputs: np.ndarray  # [N, ...], every training example as it is stored; it may be a memory-mapped file
    hidden_labels: np.ndarray  # int32 [N], the truth
    visible_labels: np.ndarray  # int32 [N], -1 where a label is hidden
    rows: np.ndarray  # int32 [n], rows of all clients, client by client
    offsets: np.ndarray  # int64 [K + 1], where each client's rows begin
    labelled_size: np.ndarray  # int32 [K]
    server_index: np.ndarray  # int32 [S]
    validation_index: np.ndarray  # int32 [V]
    test_inputs: np.ndarray  # [T, ...]
    test_labels: np.ndarray  # int32 [T]
    seed: int
    byzantine: np.ndarray | None  # bool [K]
    mislabelled: np.ndarray | None  # bool [N]
    targets: np.ndarray | None  # int32 [T]
    given_labels: np.ndarray  # float32 [C], how many labels of each class clients were given

    @property
    def sizes(self) -> np.ndarray:
        """int32 [K], examples of each client."""
        return np.diff(self.offsets).astype(np.int32)

    def rows_of(self, client: int) -> np.ndarray:
        """int32 [n_k], a client's rows."""
        return self.rows[self.offsets[client] : self.offsets[client + 1]]


def hold(
    dataset: Dataset,
    partition: Partition,
    seed: int,
    reveal_labels: bool = False,
    centralised: bool = False,
    attack: Any = None,
) -> Holdings:
    """A partitioned data set as a federation on the host.

    Args:
        dataset: the data set.
        partition: the owners of its training examples, and whose labels are visible.
        seed: the run's seed.
        reveal_labels: every label but those of validation images is visible, for the fully supervised bounds.
        centralised: the server holds all images of the federation, with their labels.
        attack: `config.attack`; None: nobody attacks.

    Raises:
        UserError: attackers lack the images from which to craft others.
    """
    sizes = np.array([len(rows) for rows in partition.client_rows], np.int64)
    rows = np.concatenate(partition.client_rows).astype(np.int32)
    at_server = np.concatenate([partition.server_index, rows]) if centralised else partition.server_index
    if centralised:
        at_server = at_server[dataset.y_train[at_server] >= 0]
    if (dataset.y_train[at_server] < 0).any():
        raise UserError("the partition gives the server a row without a label")
    visible_labels = np.full(len(dataset.y_train), -1, np.int32)
    visible = np.concatenate([at_server, partition.labelled_rows])
    if reveal_labels:
        visible = np.setdiff1d(np.arange(len(visible_labels)), partition.validation_index)
    visible_labels[visible] = dataset.y_train[visible]
    byzantine, mislabelled = _attackers(attack, partition, seed, len(visible_labels))
    if mislabelled is not None:
        lies = mislabelled & (visible_labels >= 0)
        visible_labels[lies] = (visible_labels[lies] + 1) % dataset.num_classes
    owners = np.repeat(np.arange(len(sizes)), sizes)
    crafted = None
    if attack is not None and attack.kind == "poison":
        if dataset.kind != "image":
            raise UserError(f"attack.kind='poison' is for images; the data are {dataset.kind}")
        crafted = poison(dataset, partition, np.flatnonzero(byzantine), visible_labels >= 0, attack, seed)
    given = visible_labels[rows]
    return Holdings(
        inputs=dataset.x_train if crafted is None else crafted.images,
        hidden_labels=dataset.y_train.astype(np.int32),
        visible_labels=visible_labels,
        rows=rows,
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        labelled_size=np.bincount(owners[visible_labels[rows] >= 0], minlength=len(sizes)).astype(np.int32),
        server_index=at_server.astype(np.int32),
        validation_index=partition.validation_index.astype(np.int32),
        test_inputs=dataset.x_test,
        test_labels=dataset.y_test.astype(np.int32),
        seed=seed,
        byzantine=byzantine,
        mislabelled=mislabelled,
        targets=None if crafted is None else crafted.targets.astype(np.int32),
        given_labels=np.bincount(given[given >= 0], minlength=dataset.num_classes).astype(np.float32),
    )


def federate(
    dataset: Dataset,
    partition: Partition,
    seed: int,
    reveal_labels: bool = False,
    centralised: bool = False,
    attack: Any = None,
) -> tuple[FederatedData, jax.Array]:
    """A partitioned data set on the device, with the hidden labels apart; see `hold` and `put_whole`."""
    return put_whole(hold(dataset, partition, seed, reveal_labels, centralised, attack))


def put_whole(
    held: Holdings, width: int | None = None, same_images: FederatedData | None = None
) -> tuple[FederatedData, jax.Array]:
    """Puts a federation on the device, all of it.

    Hidden labels are not part of `FederatedData`: methods never see them. Only a scorer outside the method holds
    them, to measure how many pseudo-labels are right; permuting them must not change one bit of a trained model.

    Args:
        held: the federation.
        width: n_max of `client_index`, where several seeds must share one shape; None: the largest client's size.
        same_images: a federation of the same data set, whose images are shared instead of copied, but for training
            images of which attackers craft some.

    Returns:
        The federation's data, and the hidden labels: int32 [N], the true label of every training example.

    Raises:
        ValueError: a client has more examples than `width`.
    """
    sizes = held.sizes
    width = max(1, int(sizes.max())) if width is None else width
    if sizes.max() > width:
        raise ValueError(f"width={width}, but a client has {sizes.max()} examples")
    client_index = np.zeros((len(sizes), width), np.int32)
    client_index[np.arange(width) < sizes[:, np.newaxis]] = held.rows
    shared = same_images is not None
    data = small_arrays(held)._replace(
        inputs=same_images.inputs if shared and held.targets is None else image_table(held.inputs),
        visible_labels=jnp.asarray(held.visible_labels),
        client_index=jnp.asarray(client_index),
        test_inputs=same_images.test_inputs if shared else image_table(held.test_inputs),
        test_labels=same_images.test_labels if shared else jnp.asarray(held.test_labels),
        mislabelled=None if held.mislabelled is None else jnp.asarray(held.mislabelled),
    )
    return data, jnp.asarray(held.hidden_labels)


def shapes_of(held: Holdings, client_index: jax.ShapeDtypeStruct) -> FederatedData:
    """The shapes of the whole federation on the device, of which nothing is put there."""

    def shape(array: np.ndarray | jax.Array | None) -> jax.ShapeDtypeStruct | None:
        return None if array is None else jax.ShapeDtypeStruct(array.shape, array.dtype)

    tables: dict[str, Any] = {
        name: shape(getattr(held, name)) for name in ("visible_labels", "test_labels", "mislabelled")
    }
    tables |= {name: table_shape(getattr(held, name)) for name in ("inputs", "test_inputs")}
    return jax.tree.map(shape, small_arrays(held))._replace(client_index=client_index, **tables)


def small_arrays(held: Holdings) -> FederatedData:
    """What a federation keeps on the device wherever its images are: numbers a client, and rows that the server has.

    The tables of images are empty.
    """
    none = jnp.zeros((0,), jnp.int32)
    return FederatedData(
        inputs=none,
        visible_labels=none,
        client_index=none[None],
        client_size=jnp.asarray(held.sizes),
        labelled_size=jnp.asarray(held.labelled_size),
        server_index=jnp.asarray(held.server_index),
        validation_index=jnp.asarray(held.validation_index),
        test_inputs=none,
        test_labels=none,
        seed=jnp.asarray(held.seed, jnp.uint32),
        byzantine=None if held.byzantine is None else jnp.asarray(held.byzantine),
        targets=None if held.targets is None else jnp.asarray(held.targets),
    )


def num_attackers(share: float, num_clients: int) -> int:
    """floor(share K), whatever the share's last digit."""
    return int(share * num_clients + 1e-9)


def _attackers(
    attack: Any, partition: Partition, seed: int, num_images: int
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """`byzantine` and `mislabelled` of a federation: floor(share K) clients, drawn by the seed."""
    if attack is None or attack.kind == "none":
        return None, None
    num_clients = len(partition.client_rows)
    order = np.random.default_rng([seed, ATTACKERS]).permutation(num_clients)
    drawn = order[: num_attackers(attack.share, num_clients)]
    byzantine = np.zeros(num_clients, bool)
    byzantine[drawn] = True
    if attack.kind != "labels":
        return byzantine, None
    mislabelled = np.zeros(num_images, bool)
    mislabelled[np.concatenate([np.zeros(0, int), *(partition.client_rows[client] for client in drawn)])] = True
    return byzantine, mislabelled
