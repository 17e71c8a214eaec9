"""The federation as one side sees it: the server without clients' images, a node with its own images alone.

A view has the shapes of the whole federation where a program's shapes or random numbers hang on them, and zeros in
place of what the side does not hold. So what a node computes is to the last digit what the simulation computes.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data import FederatedData, clients_may_have_labels, dataset_facts, federate, make_partition
from fedjax_ssl.data.npz import read_arrays
from fedjax_ssl.errors import UserError
from fedjax_ssl.files import expanded
from fedjax_ssl.kinds import IMAGE, kind_name, kind_of
from fedjax_ssl.run.features import read_data


def server_view(
    data: FederatedData, hidden_labels: jax.Array, sizes: np.ndarray, labelled: np.ndarray
) -> tuple[FederatedData, jax.Array]:
    """What the server holds: its labelled images, the validation and the test images, and how many the clients have.

    Args:
        data: the whole federation, of the server's data set.
        hidden_labels: int32 [N].
        sizes: int [K], each client's images, as the nodes told.
        labelled: int [K], of these those with a label.

    Returns:
        The view, and the labels of its images.
    """
    held = np.concatenate([data.server_index, data.validation_index])
    rows = held if len(held) else np.zeros(1, np.int32)  # a table has a row
    view = data._replace(
        inputs=data.inputs[rows],
        visible_labels=data.visible_labels[rows],
        client_index=jnp.zeros_like(data.client_index),
        client_size=jnp.asarray(sizes, jnp.int32),
        labelled_size=jnp.asarray(labelled, jnp.int32),
        server_index=jnp.arange(len(data.server_index), dtype=jnp.int32),
        validation_index=jnp.arange(len(data.server_index), len(held), dtype=jnp.int32),
    )
    return view, hidden_labels[rows]


def node_view(config: Any, clients: tuple[int, ...]) -> tuple[FederatedData, dict[str, Any]]:
    """What a node holds of the federation that the configuration describes: its clients' images.

    Returns:
        The view, and the data set's facts, see `dataset_facts`.
    """
    dataset = read_data(config)
    partition = make_partition(
        dataset.y_train, dataset.num_classes, config.data, config.num_clients, config.seed, dataset.owners
    )
    reveal = config.data.reveal_labels
    data, _ = federate(dataset, partition, config.seed, reveal, config.data.centralised)
    rows = [np.asarray(data.client_index[client, : data.client_size[client]]) for client in clients]
    view = of_clients(
        clients,
        [np.asarray(data.inputs)[own] for own in rows],
        [np.asarray(data.visible_labels)[own] for own in rows],
        like=data,
    )
    return view, dataset_facts(dataset)


def of_clients(
    clients: tuple[int, ...], images: list[np.ndarray], labels: list[np.ndarray], like: FederatedData
) -> FederatedData:
    """A federation in which only some clients have images.

    Args:
        clients: their ids.
        images: of each, [n, ...] as they are stored.
        labels: of each, int32 [n], -1 where the label is hidden.
        like: a federation with the number of clients, room for each one's images, the number of the server's images,
            the inputs' shape and type, and the seed.
    """
    nobody = np.zeros((1, *like.inputs.shape[1:]), like.inputs.dtype)  # row 0
    table = np.concatenate([nobody, *images])
    visible = np.concatenate([[-1], *labels]).astype(np.int32)
    index = np.zeros(like.client_index.shape, np.int32)
    sizes, labelled = np.zeros(len(index), np.int32), np.zeros(len(index), np.int32)
    first = 1
    for client, own in zip(clients, labels):
        index[client, : len(own)] = first + np.arange(len(own))
        sizes[client], labelled[client] = len(own), np.count_nonzero(own >= 0)
        first += len(own)
    return FederatedData(
        inputs=jnp.asarray(table),
        visible_labels=jnp.asarray(visible),
        client_index=jnp.asarray(index),
        client_size=jnp.asarray(sizes),
        labelled_size=jnp.asarray(labelled),
        server_index=jnp.zeros_like(like.server_index),
        validation_index=jnp.zeros((0,), jnp.int32),
        test_inputs=like.test_inputs[:0],
        test_labels=like.test_labels[:0],
        seed=like.seed,
    )


def own_view(config: Any, client: int, file: str, facts: dict[str, Any]) -> FederatedData:
    """What a node holds that has its own images.

    Args:
        config: the run's; where no client has labels, those of the file are not read.
        client: the node's.
        file: an npz with `images`, uint8 [n, H, W] or [n, H, W, C], and if any have labels `labels`, int [n], -1 where
            there is none.
        facts: of the server's data set, with `server_labels`, the number of its labelled images.

    Raises:
        UserError: there is no such file, or its arrays are not as above.
    """
    if not expanded(file).is_file():
        raise UserError(f"--node-config data={file} is not a file; give an npz with images and perhaps labels")
    if kind_name(facts) != IMAGE:
        raise UserError(f"--node-config data is for images; the server's data are {kind_of(facts).noun}")
    shape, classes = tuple(facts["image_shape"]), facts["num_classes"]
    arrays = read_arrays(file, ("images",), optional=("labels",))
    images = arrays["images"]
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or not images.size:
        raise UserError(f"{file}: images are {images.dtype} {list(images.shape)}; they must be uint8 [n, H, W, C]")
    images = images[..., np.newaxis] if images.ndim == 3 else images
    if images.shape[1:] != shape:
        raise UserError(f"{file}: an image is {list(images.shape[1:])}, the server's are {list(shape)}")
    labels = arrays.get("labels", np.full(len(images), -1))
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu" or (len(labels) and labels.max() >= classes):
        raise UserError(f"{file}: labels must be integers [{len(images)}] below {classes}, -1 where there is none")
    if not clients_may_have_labels(config.data) and not config.data.reveal_labels:
        labels = np.full(len(images), -1)
    like = FederatedData(
        inputs=jnp.zeros((1, *shape), jnp.uint8),
        visible_labels=jnp.zeros((1,), jnp.int32),
        client_index=jnp.zeros((config.num_clients, len(images)), jnp.int32),
        client_size=jnp.zeros((config.num_clients,), jnp.int32),
        labelled_size=jnp.zeros((config.num_clients,), jnp.int32),
        server_index=jnp.zeros((facts["server_labels"],), jnp.int32),
        validation_index=jnp.zeros((0,), jnp.int32),
        test_inputs=jnp.zeros((0, *shape), jnp.uint8),
        test_labels=jnp.zeros((0,), jnp.int32),
        seed=jnp.asarray(config.seed, jnp.uint32),
    )
    return of_clients((client,), [images], [labels.astype(np.int32)], like)


def facts_text(facts: dict[str, Any], data: FederatedData) -> str:
    """What a node with images of its own must know of the server's, as JSON."""
    return json.dumps({**facts, "server_labels": len(data.server_index)})
