"""The data of a federation as device arrays: images stored once, and who owns them as tables of rows."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data.owners import Partition
from fedjax_ssl.data.poison import poison
from fedjax_ssl.data.sources import Dataset
from fedjax_ssl.errors import UserError

ATTACKERS = 100  # its number among the draws of a seed, apart from those of the partition


class FederatedData(NamedTuple):
    """Everything a method may see, on the device for the whole run.

    Per-example state of a method is a flat [N] array, independent of who owns an example.
    """

    inputs: jax.Array  # [N, ...], every training example once, as it is stored: images are uint8 [N, H, W, C]
    # int32 [N], the labels of the server's images and of the clients' labelled examples, -1 wherever a label is hidden,
    # as are those of validation images.
    visible_labels: jax.Array
    client_index: jax.Array  # int32 [K, n_max], rows of `inputs` of each client, padded with 0 beyond `client_size`
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

    @property
    def at_clients(self) -> jax.Array:
        """bool [N], which rows of `inputs` a client holds."""
        present = jnp.arange(self.client_index.shape[1]) < self.client_size[:, None]
        return jnp.zeros(len(self.inputs), bool).at[self.client_index].max(present)


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
        else jnp.stack([federation[place] for federation in federations])
        for place, axis in enumerate(axes)
    ]
    return FederatedData._make(leaves)


def federate(
    dataset: Dataset,
    partition: Partition,
    seed: int,
    max_client_size: int | None = None,
    same_images: FederatedData | None = None,
    reveal_labels: bool = False,
    centralised: bool = False,
    attack: Any = None,
) -> tuple[FederatedData, jax.Array]:
    """Puts a partitioned data set on the device, with the hidden labels apart.

    Hidden labels are not part of `FederatedData`: methods never see them. Only a scorer outside the method holds
    them, to measure how many pseudo-labels are right; permuting them must not change one bit of a trained model.

    Args:
        dataset: the data set, on the host.
        partition: the owners of its training examples, and whose labels are visible.
        seed: the run's seed.
        max_client_size: the width n_max of `client_index`, where several seeds must share one shape; by default
          the size of the largest client.
        same_images: a federation of the same data set, whose images are shared instead of copied, but for training
          images of which attackers craft some.
        reveal_labels: every label but those of validation images is visible, for the fully supervised bounds.
        centralised: the server holds all images of the federation, with their labels.
        attack: `config.attack`; None: nobody attacks.

    Returns:
        The federation's data, and the hidden labels: int32 [N], the true label of every training example.

    Raises:
        ValueError: a client has more examples than `max_client_size`.
        UserError: attackers lack the images from which to craft others.
    """
    sizes = np.array([len(rows) for rows in partition.client_rows], np.int32)
    width = max(1, int(sizes.max()) if max_client_size is None else max_client_size)
    if sizes.max() > width:
        raise ValueError(f"max_client_size={max_client_size}, but a client has {sizes.max()} examples")
    client_index = np.zeros((len(sizes), width), np.int32)
    client_index[np.arange(width) < sizes[:, np.newaxis]] = np.concatenate(partition.client_rows)
    at_server = partition.server_index
    if centralised:
        at_server = np.concatenate([at_server, *partition.client_rows])
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
    labelled_size = [np.count_nonzero(visible_labels[rows] >= 0) for rows in partition.client_rows]
    shared, crafted = same_images is not None, None
    if attack is not None and attack.kind == "poison":
        if dataset.kind != "image":
            raise UserError(f"attack.kind='poison' is for images; the data are {dataset.kind}")
        crafted = poison(dataset, partition, np.flatnonzero(byzantine), visible_labels >= 0, attack, seed)
    images = dataset.x_train if crafted is None else crafted.images
    data = FederatedData(
        inputs=same_images.inputs if shared and crafted is None else jnp.asarray(images),
        visible_labels=jnp.asarray(visible_labels),
        client_index=jnp.asarray(client_index),
        client_size=jnp.asarray(sizes),
        labelled_size=jnp.asarray(labelled_size, jnp.int32),
        server_index=jnp.asarray(at_server, jnp.int32),
        validation_index=jnp.asarray(partition.validation_index, jnp.int32),
        test_inputs=same_images.test_inputs if shared else jnp.asarray(dataset.x_test),
        test_labels=same_images.test_labels if shared else jnp.asarray(dataset.y_test, jnp.int32),
        seed=jnp.asarray(seed, jnp.uint32),
        byzantine=None if byzantine is None else jnp.asarray(byzantine),
        mislabelled=None if mislabelled is None else jnp.asarray(mislabelled),
        targets=None if crafted is None else jnp.asarray(crafted.targets),
    )
    return data, jnp.asarray(dataset.y_train, jnp.int32)


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
