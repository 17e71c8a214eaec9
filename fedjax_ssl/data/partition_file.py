"""Writes, reads and checks partition files."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_ssl.base.errors import UserError, say
from fedjax_ssl.base.files import replace_arrays
from fedjax_ssl.data import npz
from fedjax_ssl.data.content import arrays_of_data
from fedjax_ssl.data.long_tail import may_be_tail
from fedjax_ssl.data.owners import NO_ROWS, Partition

_KEYS = ("server_index", "client_index", "client_size")
_TEST_KEYS = ("client_test_index", "client_test_size")  # if clients have test images
_OPTIONAL = ("labelled_index", "validation_index", *_TEST_KEYS)


def save_partition(path: str | os.PathLike[str], partition: Partition, **of_data: np.ndarray) -> None:
    """Writes a partition to an npz file, atomically.

    Args:
        path: the file. It holds server_index [S]; client_size [K]; client_index, the rows of all clients one after the
            other; labelled_index [L], the clients' rows with visible labels; validation_index [V]; and, if clients have
            test images, client_test_size [K] and client_test_index.
        of_data: of the data set, see `arrays_of_data`; and, in a run's folder, `earlier_sums`, the `row_sums` of
            examples whose labels were seen by the runs from which the run started.
    """
    replace_arrays(pathlib.Path(path), **arrays_of(partition), **of_data)


def check_data(path: str, dataset: Any) -> None:
    """Compares the data set that a partition file was drawn for, if it says so, with another.

    Raises a UserError if it was drawn for other labels. Other inputs are warned of: they may be the same images in
    another size.
    """
    if not (own := arrays_of_data(dataset)):
        return
    then = npz.read_arrays(path, (), "data.partition_file", optional=tuple(own))
    if not np.array_equal(then.get("labels_sum", own["labels_sum"]), own["labels_sum"]):
        why = "was drawn for data with other training labels, or in another order, so its rows would be other examples"
        what = "name the file of these data, or draw a new partition"
        raise UserError(f"data.partition_file={path} {why}; {what}")
    here = own["row_sums"]
    there = then.get("row_sums", here)
    others = np.count_nonzero(there != here) if there.shape == here.shape else len(here)
    if others:
        line = f"was drawn for data in which {others:,} of {len(here):,} training examples have other inputs"
        say(f"warning: {path} {line}; it fits if these are the same examples, such as images in another size")


def arrays_of(partition: Partition) -> dict[str, np.ndarray]:
    """The arrays of a partition file by name, int32; see `save_partition`."""
    tests: dict[str, np.ndarray] = {}
    if partition.client_test_rows:
        tests = dict(zip(_TEST_KEYS, _joined(partition.client_test_rows)))
    rows, sizes = _joined(partition.client_rows)
    return {
        "server_index": partition.server_index.astype(np.int32),
        "client_index": rows,
        "client_size": sizes,
        "labelled_index": partition.labelled_rows.astype(np.int32),
        "validation_index": partition.validation_index.astype(np.int32),
        **tests,
    }


def _joined(of_clients: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of all clients one after the other, and the number of each client's rows: int32."""
    return np.concatenate(of_clients).astype(np.int32), np.array([len(rows) for rows in of_clients], np.int32)


def load_partition(path: str | os.PathLike[str], num_examples: int, num_clients: int) -> Partition:
    """Reads a partition that `save_partition` wrote, and checks it.

    Args:
        path: the npz file. Without labelled_index no client has labels; without validation_index there are no
            validation images.
        num_examples: number of training examples N.
        num_clients: number of clients that the file must have.

    Raises:
        UserError: the file is missing or malformed, has another number of clients, names a row outside the training
          set, gives a row to two owners, or names a labelled row that no client has.
    """
    arrays = npz.read_arrays(str(path), _KEYS, "data.partition_file", optional=_OPTIONAL)
    for key, value in arrays.items():
        is_integer = np.issubdtype(value.dtype, np.integer) or not value.size  # NumPy makes an empty list floats
        if value.ndim != 1 or not is_integer:
            raise UserError(f"{path}: {key} is {value.dtype} of shape {value.shape}; it must be integers [n]")
    at_server, rows, sizes, labelled, validation, test_rows, test_sizes = (
        arrays.get(key, NO_ROWS).astype(np.int64) for key in (*_KEYS, *_OPTIONAL)
    )
    if len(sizes) != num_clients:
        raise UserError(f"{path} has {len(sizes)} clients, but num_clients={num_clients}")
    for name, each, of_all in (("client", sizes, rows), ("client_test", test_sizes, test_rows)):
        # Python's sum, because NumPy's could overflow.
        if len(each) not in (0, num_clients) or (each < 0).any() or sum(each.tolist()) != len(of_all):
            raise UserError(f"{path}: {name}_size must add up to the {len(of_all)} rows of {name}_index")
    owned = np.concatenate([at_server, rows, validation, test_rows])
    outside = owned[(owned < 0) | (owned >= num_examples)]
    if len(outside):
        raise UserError(f"{path} names row {outside[0]}, but the training set has {num_examples} examples")
    counts = np.bincount(owned, minlength=num_examples)
    if counts.max(initial=0) > 1:
        raise UserError(f"{path} names row {np.argmax(counts > 1)} more than once; a row has one owner")
    values, counts = np.unique(labelled, return_counts=True)
    wrong = values[(counts > 1) | ~np.isin(values, rows)]
    if len(wrong):
        raise UserError(f"{path}: row {wrong[0]} of labelled_index belongs to no client, or is named more than once")
    at_server, rows, labelled, validation, test_rows = (
        found.astype(np.int32) for found in (at_server, rows, labelled, validation, test_rows)
    )
    tests = np.split(test_rows, np.cumsum(test_sizes)[:-1]) if len(test_sizes) else ()
    return Partition(at_server, np.split(rows, np.cumsum(sizes)[:-1]), labelled, validation, tuple(tests))


def load_for(config: Any, of_all: np.ndarray, num_classes: int, num_clients: int) -> Partition:
    """The partition in `config.partition_file`, checked against the other fields of `config`.

    `of_all` are the labels of all training examples, int [N]; -1: no label.
    """
    path, labels = config.partition_file, config.labels
    partition = load_partition(path, len(of_all), num_clients)
    if labels == "server" and not config.server_labels:  # nobody has labels: the file's are hidden
        partition = partition._replace(labelled_rows=NO_ROWS)
    labelled, of_server = len(partition.labelled_rows), len(partition.server_index)
    held_out, has_tests = len(partition.validation_index), bool(partition.client_test_rows)
    largest, most = max(map(len, partition.client_rows)), config.examples_per_client
    where = {"server": not labelled, "profile": labelled or of_server}.get(labels, labelled and not of_server)
    as_asked = labels not in ("server", "profile") or of_server == config.server_labels
    rows = np.concatenate([partition.server_index, *partition.client_rows, *partition.client_test_rows])
    is_tail = may_be_tail(of_all[rows], np.delete(of_all, partition.validation_index), num_classes, config.imbalance)
    tests, same_tests = f"{'' if has_tests else 'no '}test images", has_tests == bool(config.client_test_share)
    for field, has, fits in (
        ("labels", f"{of_server} images of the server and {labelled} labelled examples at clients", where),
        ("server_labels", f"{of_server} images of the server", as_asked),
        ("validation", f"{held_out} validation images", held_out == config.validation),
        ("client_test_share", f"{tests} of clients", same_tests),
        ("imbalance", f"{len(rows)} examples of the server and the clients", is_tail),
        ("examples_per_client", f"a client with {largest} examples", not most or largest <= most),
    ):
        if not fits:
            raise UserError(f"{path} has {has}, which does not fit data.{field}={config[field]!r}")
    if labels == "some_clients":
        check_labelled_clients(path, partition.labelled_rows, partition.client_rows, config.labelled_clients)
    return partition


def check_labelled_clients(
    source: str, labelled: np.ndarray, client_rows: Sequence[np.ndarray], labelled_clients: int
) -> None:
    """Raises a UserError unless `labelled_clients` clients have labels for all their rows, and the others for none.

    `labelled` are the clients' rows with labels, int [L]; `source` says who says so, for the message.
    """
    is_labelled = np.zeros(max((int(rows.max()) for rows in client_rows if len(rows)), default=-1) + 1, bool)
    is_labelled[labelled] = True
    counts = [(int(np.count_nonzero(is_labelled[rows])), len(rows)) for rows in client_rows]
    partly = [client for client, (known, size) in enumerate(counts) if 0 < known < size]
    if partly:
        raise UserError(f"{source}: client {partly[0]} has some labels, but data.labels='some_clients'; use 'clients'")
    wholly = sum(known > 0 for known, _ in counts)
    if wholly != labelled_clients:
        raise UserError(f"{source}: {wholly} clients have labels, but data.labelled_clients={labelled_clients}")
