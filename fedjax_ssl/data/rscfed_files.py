"""Reads the partition files that RSCFed and SemiAnAgg publish, without PyTorch and without unpickling."""

import io
import os
import pathlib
import zipfile
from typing import Any

import numpy as np

from fedjax_ssl.data.owners import Partition
from fedjax_ssl.data.plain_pickle import Array, read_plain
from fedjax_ssl.errors import UserError, first_line
from fedjax_ssl.files import read_whole

_MOST_ROWS = 10**7  # over all clients: a small file may name one list a million times


def read_rscfed_partition(path: str | os.PathLike[str], labelled_clients: tuple[int, ...] = (0,)) -> Partition:
    """Reads a file of RSCFed's folder `partition_strategy/`; `save_partition` can save the result.

    The rows index the training set in torchvision's order. An npz written from torchvision has this order; TensorFlow
    Datasets does not. For skin lesions the rows index the file's own list of training images, see `read_rscfed_lists`.

    Args:
        path: a file written by `torch.save`, with the clients' rows under `data_partition`; or a pickle of the clients'
          rows and the rows of the long-tailed set that they index.
        labelled_clients: clients with visible labels; in RSCFed's files the first client.

    Returns:
        The partition; the server has no images.

    Raises:
        UserError: the file is missing, or contains anything but plain data in this form.
    """
    held = _read(path)
    tail = None
    if isinstance(held, tuple) and len(held) == 2:
        held, tail = held
    elif isinstance(held, dict) and "data_partition" in held:
        held = held["data_partition"]
    if not isinstance(held, dict) or set(held) != set(range(len(held))) or not held:
        raise UserError(f"{path} holds no rows of clients 0 to K - 1; give a file of RSCFed's partition_strategy")
    rows, number = [], 0
    for client in range(len(held)):
        rows.append(_rows(path, f"client {client}", held[client]))
        number += len(rows[-1])
        if number > _MOST_ROWS:
            raise UserError(f"{path} gives its clients more than {_MOST_ROWS} rows")
    if tail is not None:
        tail = _rows(path, "the long-tailed set", tail)
        beyond = [of_client.max() for of_client in rows if len(of_client) and of_client.max() >= len(tail)]
        if beyond:
            raise UserError(f"{path} names place {beyond[0]} of a long-tailed set of {len(tail)} images")
        rows = [tail[of_client] for of_client in rows]
    unknown = [client for client in labelled_clients if not 0 <= client < len(rows)]
    if unknown:
        raise UserError(f"{path} has clients 0 to {len(rows) - 1}, but no labelled client {unknown[0]}")
    rows = [of_client.astype(np.int32) for of_client in rows]
    nobody = np.zeros(0, np.int32)
    return Partition(nobody, rows, np.concatenate([nobody, *(rows[client] for client in labelled_clients)]))


def read_rscfed_lists(path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray]:
    """Reads the rows of HAM10000's table for training and testing from a file of skin lesions: int64 [N], [T].

    Raises:
        UserError: as in `read_rscfed_partition`, or the file has no such lists.
    """
    held = _read(path)
    if not isinstance(held, dict) or not {"train_list", "test_list"} <= set(held):
        raise UserError(f"{path} has no train_list and test_list; only RSCFed's files of skin lesions have them")
    train, test = (_rows(path, name, held[name]) for name in ("train_list", "test_list"))
    return train, test


def _rows(path: str | os.PathLike[str], whose: str, given: Any) -> np.ndarray:
    """Rows as int64 [n]; each must fit into an int32."""
    if isinstance(given, Array):
        rows = given.values
    elif isinstance(given, list | tuple) and all(type(row) is int and abs(row) < 2**31 for row in given):
        rows = np.array(given, np.int64)
    else:
        raise UserError(f"{path}: {whose} has no list of rows")
    if len(rows) and not (np.min(rows) >= 0 and np.max(rows) < 2**31):
        raise UserError(f"{path}: {whose} has rows from {np.min(rows)} to {np.max(rows)}, which cannot be rows")
    return rows


def _read(path: str | os.PathLike[str]) -> Any:
    try:
        content = read_whole(pathlib.Path(path))
        if zipfile.is_zipfile(io.BytesIO(content)):  # written by torch.save, which does not compress
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                held = next(member for member in archive.infolist() if member.filename.endswith("data.pkl"))
                if held.file_size > len(content):
                    raise ValueError(f"it unpacks to {held.file_size} bytes")
                content = archive.read(held)
        return read_plain(content)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # a damaged pickle raises errors of many kinds
        raise UserError(f"{path} is not a partition of plain numbers ({first_line(error)})") from error
