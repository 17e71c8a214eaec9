"""A partition: who owns which rows of the training set."""

from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data.values import in_order, is_missing, same, text_of

UNKNOWN = -2  # the true label of images of no class of the model; -1 is a label that nobody knows
NO_ROWS = np.zeros(0, np.int32)


class Partition(NamedTuple):
    """Rows of the training set by owner; each row has at most one owner."""

    server_index: np.ndarray  # int32 [S], rows of the server's labelled examples, in random order
    client_rows: list[np.ndarray]  # K arrays int32 [n_k], rows of each client, in random order
    # int32 [L], clients' rows with visible labels, client by client
    labelled_rows: np.ndarray = NO_ROWS
    validation_index: np.ndarray = NO_ROWS  # int32 [V], rows that nobody trains on, in random order
    # K arrays int32, rows of each client's own test images, which nobody trains on; () if no client has any.
    client_test_rows: tuple[np.ndarray, ...] = ()


def read_owners(values: Any, train: np.ndarray, where: str) -> np.ndarray:
    """The client of each training row, int32 [n], by the names of all rows' clients, [N].

    Equal numbers are one client. Only names with a row in `train`, int [n], are clients; they are numbered in the order
    of `in_order`. `where` is the file and the column, for messages. Raises a UserError if a row, also one for testing,
    names no client.
    """
    of_train = read_names(values, train, where, "client")
    codes = {name: code for code, name in enumerate(in_order(of_train))}
    return np.array([codes[name] for name in of_train], np.int32)


def read_names(values: Any, rows: Any, where: str, what: str) -> np.ndarray:
    """The names of some rows' clients or domains (`what`), str [n], by those of all rows; see `read_owners`."""
    names = [text_of(value) for value in values]
    for row, name in enumerate(names, start=1):
        if name is None or is_missing(name):
            shown = values[row - 1] if name is None else name
            raise UserError(f"{where}: {shown!r:.60} in row {row} names no {what}")
    return np.array([same(str(names[row])) for row in rows])


def hold_out(client_rows: list[np.ndarray], share: float) -> tuple[list[np.ndarray], tuple[np.ndarray, ...]]:
    """Splits each client's rows, [n_k] in random order, into training rows and a share of test rows, rounded.

    A client keeps at least one row for training. There are no test rows, (), if the share is 0.
    """
    if not share:
        return client_rows, ()
    kept = [max(min(len(rows), 1), len(rows) - int(share * len(rows) + 0.5)) for rows in client_rows]
    return [rows[:n] for rows, n in zip(client_rows, kept)], tuple(rows[n:] for rows, n in zip(client_rows, kept))


def leave_out(partition: Partition, client: int | None) -> Partition:
    """The partition without the examples of a client, which keeps its number; a UserError if there is none such."""
    if client is None:
        return partition
    number = len(partition.client_rows)
    if client >= number:
        raise UserError(f"data.left_out={client}, but the {number} clients are 0 to {number - 1}")
    rows, tests = list(partition.client_rows), list(partition.client_test_rows)
    labelled = partition.labelled_rows[~np.isin(partition.labelled_rows, rows[client])]
    rows[client] = NO_ROWS
    if tests:
        tests[client] = NO_ROWS
    return partition._replace(client_rows=rows, labelled_rows=labelled, client_test_rows=tuple(tests))


def class_counts(labels: np.ndarray, partition: Partition, num_classes: int) -> dict[str, np.ndarray]:
    """The number of examples of each of C classes at each owner, for figures and reports, from labels int [N].

    `train`, `server` and `validation` are int [C], the first of all training examples; `clients`, and `labelled` of the
    clients' examples with visible labels, int [K, C]. If there are any: two kinds of the clients' examples that no
    class count includes, int [K], `unlabelled`, whose label nobody knows, and `unknown`, which are of no class.
    """
    is_labelled = np.zeros(len(labels), bool)
    is_labelled[partition.labelled_rows] = True

    def count(rows: np.ndarray) -> np.ndarray:
        found = labels[rows]
        return np.bincount(found[found >= 0], minlength=num_classes)

    number = len(partition.client_rows)
    rows = np.concatenate(partition.client_rows)
    owners = np.repeat(np.arange(number), [len(own) for own in partition.client_rows])

    def count_each(counted: np.ndarray) -> np.ndarray:
        """The class counts of each client over the selected rows, bool [n]."""
        known = counted & (labels[rows] >= 0)
        of_each = owners[known] * num_classes + labels[rows[known]]
        return np.bincount(of_each, minlength=number * num_classes).reshape(number, num_classes).astype(np.int32)

    missing = {"unlabelled": -1, "unknown": UNKNOWN}
    without = {name: np.bincount(owners[labels[rows] == label], minlength=number) for name, label in missing.items()}
    return {
        "train": count(np.arange(len(labels))),
        "validation": count(partition.validation_index),
        "server": count(partition.server_index),
        "clients": count_each(np.ones(len(rows), bool)),
        "labelled": count_each(is_labelled[rows]),
        **{name: numbers for name, numbers in without.items() if numbers.any()},
    }
