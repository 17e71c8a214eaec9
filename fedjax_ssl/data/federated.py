"""The data of a federation as device arrays: each image is stored once, and tables of rows say who owns it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data.owners import NO_ROWS, Partition
from fedjax_ssl.data.poison import poison
from fedjax_ssl.data.sources import Dataset
from fedjax_ssl.data.table import image_table, table_shape

ATTACKERS = 100  # folded into the seed for the draw of attackers


class Attackers(NamedTuple):
    """Who attacks in a federation, see `config.attack`; arrays on the host or on the device."""

    clients: Any  # bool [K], the attackers
    # bool [N], the images with false labels: visible labels are already those of the next class, and pseudo-labels
    # will be shifted in the same way. None: there are none.
    mislabelled: Any = None
    targets: Any = None  # int32 [T], rows of the images that attackers want mislabelled; None: they craft no images


class Here(NamedTuple):
    """The clients of a view of a federation, which is not on the device as a whole; see `config.residence`."""

    clients: jax.Array  # int32 [K'], ascending: the clients whose rows and memory are on the device
    # int32 [K''], ascending: those whose records are on the device, see `Method.recalls`. None: those of `clients`.
    records: jax.Array | None = None


class FederatedData(NamedTuple):
    """The images, labels, rows and sizes of a federation: all of it on the device, or a round's clients (see `here`).

    In such a view rows of `inputs` change from round to round. So what a method remembers of each example belongs in
    its client's memory, [n_max] by the example's position among the client's.
    """

    inputs: jax.Array  # [N, ...], every training example once, as it is stored: images are uint8, see `image_table`
    visible_labels: jax.Array  # int32 [N], of the server's images and the clients' labelled examples; others have -1
    client_index: jax.Array  # int32 [K', n_max], rows of the clients `ids`, padded with 0; methods use `rows_of`
    client_size: jax.Array  # int32 [K], number of examples of each client, possibly 0
    labelled_size: jax.Array  # int32 [K], number of examples with a visible label
    largest_size: jax.Array  # int32 [], that of the largest client; n_max may be more, see `table_width`
    server_index: jax.Array  # int32 [S], rows of `inputs` that the server holds; S may be 0
    validation_index: jax.Array  # int32 [V], rows that nobody trains on, to evaluate each round; V may be 0
    test_inputs: jax.Array  # [T, ...], in the stored form
    test_labels: jax.Array  # int32 [T]
    seed: jax.Array  # uint32 [], the run's seed; data, not a constant, so that another seed needs no compilation
    # The domains that the data name -> bool [V], or [T] without validation images: which of them are of this domain.
    domains: Mapping[str, jax.Array] = {}
    numbers: Mapping[str, jax.Array] = {}  # of the configuration, by dotted names: data as well, for the same reason
    given_labels: jax.Array | None = None  # float32 [C], of each class at clients, if not all clients are here
    here: Here | None = None  # None: all clients' rows, memory and records are on the device
    # Three entries that the server's stages of a method do not get, see `seen`.
    secret: jax.Array | None = None  # uint32 [4, 2], the keys of cohorts and noise with `privacy.noise`, else None
    attackers: Attackers | None = None  # None: there are none
    unknown_inputs: jax.Array | None = None  # [U, ...], test inputs of no class of the model; None: there are none

    @property
    def seen(self) -> "FederatedData":
        """What the server's stages of a method get."""
        return self._replace(secret=None, attackers=None, unknown_inputs=None)

    @property
    def width(self) -> int:
        """n_max: the length of a client's rows with padding."""
        return self.client_index.shape[-1]

    @property
    def ids(self) -> jax.Array:
        """int32 [K'], the clients whose rows and memory are on the device, usually all K; memory is in this order."""
        return jnp.arange(len(self.client_size), dtype=jnp.int32) if self.here is None else self.here.clients

    def place(self, clients: jax.Array) -> jax.Array:
        """Positions of some clients in `ids`, and so in the memory: int32 of the same shape."""
        return clients if self.here is None else jnp.searchsorted(self.here.clients, clients)

    @property
    def record_ids(self) -> jax.Array:
        """int32 [K''], the clients whose records are on the device, usually all K; records are in this order."""
        return self.ids if self.here is None or self.here.records is None else self.here.records

    def record_place(self, clients: jax.Array) -> jax.Array:
        """Positions of some clients in `record_ids`, and so in the records: int32 of the same shape."""
        return clients if self.here is None else jnp.searchsorted(self.record_ids, clients)

    def rows_of(self, clients: jax.Array) -> jax.Array:
        """Rows in `inputs` of some clients' examples, int32 [M, n_max]; entries beyond `client_size` are padding."""
        return self.client_index[self.place(clients)]

    def all_rows(self, reader: str, instead: str) -> jax.Array:
        """Rows in `inputs` of all clients' examples, int32 [K, n_max], for a feature `reader`.

        A UserError at tracing, if only the clients of a round are on the device; it names the setting `instead`.
        """
        if self.here is not None:
            raise UserError(
                f"{reader} reads the images of all clients in one step, but the device only has a round's: set "
                f"{instead}, or keep all of them there (residence.data, residence.clients)"
            )
        return self.client_index

    def at_clients(self, reader: str, instead: str) -> jax.Array:
        """bool [N], which rows of `inputs` clients hold; arguments and errors as in `all_rows`."""
        rows = self.all_rows(reader, instead)
        present = jnp.arange(self.width) < self.client_size[:, None]
        return jnp.zeros(len(self.inputs), bool).at[rows].max(present)


_SHARED = ("inputs", "test_inputs", "test_labels", "unknown_inputs")
# Axes for `jax.vmap` over runs that train together: 0 for arrays that differ, None for shared ones such as the images.
SEED_AXES: Any = FederatedData._make(None if name in _SHARED else 0 for name in FederatedData._fields)


def seed_axes(data: FederatedData) -> Any:
    """`SEED_AXES` for stacked federations; images also differ if attackers have crafted some of them."""
    return SEED_AXES._replace(inputs=0 if data.inputs.ndim == 5 else None)


def stack_seeds(federations: list[FederatedData]) -> FederatedData:
    """Stacks those arrays of several seeds' federations that differ (see `SEED_AXES`)."""
    axes = SEED_AXES._replace(inputs=0 if _crafted(federations[0].attackers) else None)
    return FederatedData._make(
        of_seeds[0] if axis is None else jax.tree.map(lambda *of: jnp.stack(of), *of_seeds)
        for of_seeds, axis in zip(zip(*federations), axes)
    )


def of_seed(stacked: FederatedData, number: int) -> FederatedData:
    """The federation of one seed, out of a stack made by `stack_seeds`."""
    return FederatedData._make(
        leaf if axis is None else jax.tree.map(lambda of_all: of_all[number], leaf)
        for leaf, axis in zip(stacked, seed_axes(stacked))
    )


def _crafted(attackers: Attackers | None) -> bool:
    """Whether attackers have crafted images."""
    return attackers is not None and attackers.targets is not None


class Holdings(NamedTuple):
    """A federation on the host: each image once, the owners, and the visible labels."""

    inputs: np.ndarray  # [N, ...], every training example in its stored form; may be a memory-mapped file
    hidden_labels: np.ndarray  # int32 [N], the true labels; `UNKNOWN` for images of no class
    visible_labels: np.ndarray  # int32 [N], -1 for hidden labels
    rows: np.ndarray  # int32 [n], rows of all clients' examples, client by client
    offsets: np.ndarray  # int64 [K + 1], where each client's rows begin in `rows`
    labelled_size: np.ndarray  # int32 [K]
    largest_size: int  # number of examples of the federation's largest client
    width: int  # n_max, see `table_width`
    server_index: np.ndarray  # int32 [S]
    validation_index: np.ndarray  # int32 [V]
    test_inputs: np.ndarray  # [T, ...]
    test_labels: np.ndarray  # int32 [T]
    seed: int
    attackers: Attackers | None
    given_labels: np.ndarray  # float32 [C], number of labels of each class at clients
    unknown_inputs: np.ndarray | None  # [U, ...]
    # Three further entries, see `FederatedData`.
    domains: Mapping[str, np.ndarray] = {}
    numbers: Mapping[str, float] = {}
    secret: np.ndarray | None = None

    @property
    def sizes(self) -> np.ndarray:
        """int32 [K], number of examples of each client."""
        return np.diff(self.offsets).astype(np.int32)

    def rows_of(self, client: int) -> np.ndarray:
        """int32 [n_k], rows of a client's examples."""
        return self.rows[self.offsets[client] : self.offsets[client + 1]]


def hold(
    dataset: Dataset, partition: Partition, seed: int, reveal_labels: bool = False, centralised: bool = False,
    attack: Any = None,
) -> Holdings:  # fmt: skip
    """Makes a federation on the host from a partitioned data set.

    Args:
        dataset, partition: the data, the owners of the training examples, and the visible labels.
        reveal_labels: whether all labels except those of validation images are visible, for fully supervised bounds.
        centralised: whether the server holds all images of the federation with their labels.
        attack: `config.attack`; None: no attack.

    Raises:
        UserError: attackers lack the images that their attack needs; or a row of the server, of a client's labelled
            examples, of the validation images or of a client's test images has no label.
    """
    sizes = np.array([len(rows) for rows in partition.client_rows], np.int64)
    rows = np.concatenate(partition.client_rows).astype(np.int32)
    at_server = np.concatenate([partition.server_index, rows]) if centralised else partition.server_index
    if centralised:
        at_server = at_server[dataset.y_train[at_server] >= 0]
    for what, needed in {
        "to the server": at_server,
        "as labelled to a client": partition.labelled_rows,
        "to the validation images": partition.validation_index,
        "to a client's test images": np.concatenate([NO_ROWS, *partition.client_test_rows]),
    }.items():
        unknown = needed[dataset.y_train[needed] < 0]
        if len(unknown):
            raise UserError(f"the partition gives row {unknown[0]}, which has no label, {what}")
    visible_labels = np.full(len(dataset.y_train), -1, np.int32)
    visible = np.concatenate([at_server, partition.labelled_rows])
    if reveal_labels:
        nobodys = np.concatenate([partition.validation_index, *partition.client_test_rows])
        visible = np.setdiff1d(np.arange(len(visible_labels)), nobodys)
    visible_labels[visible] = np.maximum(dataset.y_train[visible], -1)  # nobody is told that an image is `UNKNOWN`
    inputs, attackers = dataset.x_train, _attackers(attack, partition, seed, len(visible_labels))
    if attackers is not None and attackers.mislabelled is not None:
        lies = attackers.mislabelled & (visible_labels >= 0)
        visible_labels[lies] = (visible_labels[lies] + 1) % dataset.num_classes
    owners = np.repeat(np.arange(len(sizes)), sizes)
    if attackers is not None and attack.kind == "poison":
        if dataset.kind != "image":
            raise UserError(f"attack.kind='poison' is for images; the data are {dataset.kind}")
        liars = np.flatnonzero(attackers.clients)
        inputs, targets = poison(dataset, partition, liars, visible_labels >= 0, attack, seed)
        attackers = attackers._replace(targets=targets)
    given, held_out = visible_labels[rows], partition.validation_index
    of_measured = dataset.domains and (dataset.domains[0][held_out] if len(held_out) else dataset.domains[1])
    domains = {name: np.asarray(of_measured) == name for name in dataset.tested_domains}
    return Holdings(
        inputs=inputs,
        hidden_labels=dataset.y_train.astype(np.int32),
        visible_labels=visible_labels,
        rows=rows,
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        labelled_size=np.bincount(owners[visible_labels[rows] >= 0], minlength=len(sizes)).astype(np.int32),
        largest_size=int(sizes.max()),
        width=table_width(sizes),
        server_index=at_server.astype(np.int32),
        validation_index=partition.validation_index.astype(np.int32),
        test_inputs=dataset.x_test,
        test_labels=dataset.y_test.astype(np.int32),
        seed=seed,
        attackers=attackers,
        given_labels=np.bincount(given[given >= 0], minlength=dataset.num_classes).astype(np.float32),
        unknown_inputs=dataset.unknown_test,
        domains=domains,
    )


def table_width(sizes: np.ndarray) -> int:
    """n_max of the table with all clients' rows: the largest of their `sizes`, int [K], at least 1, or more.

    If sizes differ, the largest one differs from seed to seed, and each width needs its own program. So it is rounded
    up, to one of four numbers between 2^i and 2^(i + 1). No result depends on it, except by rounding.
    """
    largest = max(1, int(sizes.max()))
    step = 1 << max(largest.bit_length() - 3, 0)
    return largest if largest - sizes.min() <= 1 else -(-largest // step) * step


def federate(dataset: Dataset, partition: Partition, seed: int, **options: Any) -> tuple[FederatedData, jax.Array]:
    """A partitioned data set on the device, and the hidden labels: `hold`, whose options it takes, and `put_whole`."""
    return put_whole(hold(dataset, partition, seed, **options))


def put_whole(held: Holdings, same_images: FederatedData | None = None) -> tuple[FederatedData, jax.Array]:
    """Puts a whole federation on the device: its data, and the hidden labels, int32 [N], of all training examples.

    Methods never see hidden labels, which are not part of `FederatedData`. Only evaluation outside the method uses
    them, to measure the accuracy of pseudo-labels. Permuting them must not change a single bit of a trained model.

    The arrays of `same_images`, a federation of the same data set, are reused; but training images are still copied if
    attackers have crafted some of them.
    """
    sizes = held.sizes
    client_index = np.zeros((len(sizes), held.width), np.int32)
    client_index[np.arange(held.width) < sizes[:, np.newaxis]] = held.rows
    shared = same_images is not None
    data = small_arrays(held)._replace(
        inputs=same_images.inputs if shared and not _crafted(held.attackers) else image_table(held.inputs),
        visible_labels=jax.device_put(held.visible_labels),
        client_index=jax.device_put(client_index),
        test_inputs=same_images.test_inputs if shared else image_table(held.test_inputs),
        test_labels=same_images.test_labels if shared else jax.device_put(held.test_labels),
        unknown_inputs=same_images.unknown_inputs if shared else image_table(held.unknown_inputs),
    )
    return data, jax.device_put(held.hidden_labels)


def shapes_of(held: Holdings, client_index: jax.ShapeDtypeStruct) -> FederatedData:
    """The shapes of the whole federation on the device; nothing is put there."""

    def shape(array: np.ndarray | jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=jax.typeof(array).weak_type)

    tables: dict[str, Any] = {name: shape(getattr(held, name)) for name in ("visible_labels", "test_labels")}
    tables |= {name: table_shape(getattr(held, name)) for name in ("inputs", "test_inputs", "unknown_inputs")}
    return jax.tree.map(shape, small_arrays(held))._replace(client_index=client_index, **tables)


def small_arrays(held: Holdings) -> FederatedData:
    """What is always on the device: one entry for each client, and the server's rows. Tables of images are empty."""
    none = np.zeros((0,), np.int32)
    arrays: dict[str, Any] = {
        "inputs": none,
        "visible_labels": none,
        "client_index": none[np.newaxis],
        "client_size": held.sizes,
        "labelled_size": held.labelled_size,
        "largest_size": np.int32(held.largest_size),
        "server_index": held.server_index,
        "validation_index": held.validation_index,
        "test_inputs": none,
        "test_labels": none,
        "seed": np.uint32(held.seed),
        "domains": dict(held.domains),
        "numbers": dict(held.numbers),  # weakly typed, as Python numbers are
        "attackers": held.attackers,
        "secret": held.secret,
    }
    return FederatedData(**jax.device_put(arrays))  # `jnp.asarray` would compile a program for each shape


def num_attackers(share: float, num_clients: int) -> int:
    """floor(share * K), robust to rounding of `share`."""
    return int(share * num_clients + 1e-9)


def _attackers(attack: Any, partition: Partition, seed: int, num_images: int) -> Attackers | None:
    """Draws floor(share * K) attackers by the seed; None: there are none."""
    if attack is None or attack.kind == "none":
        return None
    num_clients = len(partition.client_rows)
    order = np.random.default_rng([seed, ATTACKERS]).permutation(num_clients)
    drawn = order[: num_attackers(attack.share, num_clients)]
    byzantine = np.isin(np.arange(num_clients), drawn)
    if attack.kind != "labels":
        return Attackers(byzantine)
    lies = np.concatenate([NO_ROWS, *(partition.client_rows[client] for client in drawn)])
    return Attackers(byzantine, np.isin(np.arange(num_images), lies))
