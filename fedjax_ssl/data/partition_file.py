"""A partition's file: written, read and checked."""

import os
import pathlib
from typing import Any

import numpy as np

from fedjax_ssl.data import npz
from fedjax_ssl.data.owners import NO_ROWS, Partition
from fedjax_ssl.errors import UserError
from fedjax_ssl.files import replace_arrays

_SERVER_KEY, _KEYS = "server_index", ("client_index", "client_size")
_LABELLED_KEY, _VALIDATION_KEY = "labelled_index", "validation_index"  # files of earlier versions have none
_OLD_SERVER_KEY = "anchor_index"  # its name in them


def save_partition(path: str | os.PathLike[str], partition: Partition) -> None:
    """Writes a partition to an npz file, whole or not at all.

    Args:
        path: the file to be written. It holds server_index [S], client_size [K], client_index, the rows of all
          clients one after the other, labelled_index [L], the clients' rows whose labels are visible, and
          validation_index [V].
        partition: the partition.
    """
    replace_arrays(pathlib.Path(path), **arrays_of(partition))


def arrays_of(partition: Partition) -> dict[str, np.ndarray]:
    """The arrays that a partition's file holds, by name, int32; see `save_partition`."""
    return {
        "server_index": partition.server_index.astype(np.int32),
        "client_index": np.concatenate(partition.client_rows).astype(np.int32),
        "client_size": np.array([len(rows) for rows in partition.client_rows], np.int32),
        "labelled_index": partition.labelled_rows.astype(np.int32),
        "validation_index": partition.validation_index.astype(np.int32),
    }


def load_partition(
    path: str | os.PathLike[str], num_examples: int, num_clients: int, server_labels: int | None = None
) -> Partition:
    """Reads a partition that `save_partition` wrote, and checks it.

    Args:
        path: the npz file. Without labelled_index no client has labels, without validation_index there are no
          validation images.
        num_examples: number of training examples N.
        num_clients: number of clients that it must have.
        server_labels: number of the server's images that it must have, if given.

    Returns:
        The partition.

    Raises:
        UserError: the file is missing or malformed, has another number of clients or of the server's images, names a
          row outside the training set, gives a row to two owners, or names a labelled row that no client has.
    """
    optional = (_LABELLED_KEY, _VALIDATION_KEY)
    arrays = npz.read_arrays(
        str(path), _KEYS, "data.partition_file", optional=(_SERVER_KEY, _OLD_SERVER_KEY, *optional)
    )
    if _OLD_SERVER_KEY in arrays:
        arrays.setdefault(_SERVER_KEY, arrays.pop(_OLD_SERVER_KEY))
    if _SERVER_KEY not in arrays:
        raise UserError(f"{path} has no {_SERVER_KEY} (data.partition_file)")
    for key, value in arrays.items():
        is_integer = np.issubdtype(value.dtype, np.integer) or not value.size  # NumPy makes an empty list floats
        if value.ndim != 1 or not is_integer:
            raise UserError(f"{path}: {key} is {value.dtype} of shape {value.shape}; it must be integers [n]")
    at_server, rows, sizes, labelled, validation = (
        arrays.get(key, NO_ROWS).astype(np.int64) for key in (_SERVER_KEY, *_KEYS, *optional)
    )
    if len(sizes) != num_clients:
        raise UserError(f"{path} has {len(sizes)} clients, but num_clients={num_clients}")
    if server_labels is not None and len(at_server) != server_labels:
        raise UserError(f"{path} has {len(at_server)} images of the server, but data.server_labels={server_labels}")
    if (sizes < 0).any() or sizes.sum() != len(rows):
        raise UserError(f"{path}: client_size must add up to the {len(rows)} rows of client_index, not {sizes.sum()}")
    owned = np.concatenate([at_server, rows, validation])
    outside = owned[(owned < 0) | (owned >= num_examples)]
    if len(outside):
        raise UserError(f"{path} names row {outside[0]}, but the training set has {num_examples} examples")
    values, counts = np.unique(owned, return_counts=True)
    if (counts > 1).any():
        raise UserError(f"{path} names row {values[counts > 1][0]} more than once; a row has one owner")
    without_owner = labelled[~np.isin(labelled, rows)]
    if len(without_owner):
        raise UserError(f"{path}: row {without_owner[0]} of {_LABELLED_KEY} belongs to no client")
    values, counts = np.unique(labelled, return_counts=True)
    if (counts > 1).any():
        raise UserError(f"{path}: {_LABELLED_KEY} names row {values[counts > 1][0]} more than once")
    client_rows = np.split(rows.astype(np.int32), np.cumsum(sizes)[:-1])
    return Partition(at_server.astype(np.int32), client_rows, labelled.astype(np.int32), validation.astype(np.int32))


def load_for(config: Any, num_examples: int, num_clients: int) -> Partition:
    """The partition in `config.partition_file`, which must have its labels where `config.labels` says, and as many
    validation images as `config.validation`; nobody may have more than `config.examples_per_client`."""
    path, labels = config.partition_file, config.labels
    at_server = labels == "server"
    partition = load_partition(path, num_examples, num_clients, config.server_labels if at_server else None)
    held_out = len(partition.validation_index)
    if held_out != config.validation:
        raise UserError(f"{path} has {held_out} validation images, but data.validation={config.validation}")
    sizes, most = [len(rows) for rows in partition.client_rows], config.examples_per_client
    if most and max(sizes) > most:
        client = int(np.argmax(sizes))
        raise UserError(
            f"{path} gives client {client} {sizes[client]} examples, but data.examples_per_client={most}; the saved "
            "partition is used as it is, with data.examples_per_client=0"
        )
    labelled = len(partition.labelled_rows)
    if at_server and labelled:
        raise UserError(
            f"{path} has {labelled} labelled examples at clients, but data.labels='server'; use 'clients' or "
            "'some_clients'"
        )
    if not at_server and not labelled:
        raise UserError(f"{path} has no labelled examples at clients (labelled_index), but data.labels={labels!r}")
    if not at_server and len(partition.server_index):
        raise UserError(
            f"{path} has {len(partition.server_index)} images of the server, which has none with data.labels={labels!r}"
        )
    if labels == "some_clients":
        counts = [(int(np.isin(rows, partition.labelled_rows).sum()), len(rows)) for rows in partition.client_rows]
        partly = [client for client, (known, size) in enumerate(counts) if 0 < known < size]
        if partly:
            raise UserError(
                f"{path} labels client {partly[0]} in part, but data.labels='some_clients'; use data.labels='clients'"
            )
        wholly = sum(known > 0 for known, _ in counts)
        if wholly != config.labelled_clients:
            raise UserError(
                f"{path} has {wholly} labelled clients, but data.labelled_clients={config.labelled_clients}"
            )
    return partition
