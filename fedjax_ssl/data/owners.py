"""A partition: who owns which rows of the training set."""

from typing import NamedTuple

import numpy as np

NO_ROWS = np.zeros(0, np.int32)


class Partition(NamedTuple):
    """Rows of the training set, by owner; no row has two owners."""

    server_index: np.ndarray  # int32 [S], rows of the labelled examples that the server holds, in random order
    client_rows: list[np.ndarray]  # K arrays int32 [n_k], rows of each client, in random order
    # int32 [L], rows at clients whose labels are visible, client by client. If there are any, the server has none.
    labelled_rows: np.ndarray = NO_ROWS
    validation_index: np.ndarray = NO_ROWS  # int32 [V], rows that nobody trains on, in random order


def class_counts(labels: np.ndarray, partition: Partition, num_classes: int) -> dict[str, np.ndarray]:
    """Who holds what: examples of each class, for pictures and reports.

    Args:
        labels: int [N], labels of the training set; -1 where it has none, which are not counted.
        partition: its owners.
        num_classes: number of classes C.

    Returns:
        `train`, int [C], the whole training set; `server`, int [C], the server's part of it; `clients`, int [K, C];
        `labelled`, int [K, C], the clients' examples whose labels are visible; `validation`, int [C], nobody's.
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
        """Of the rows that count, bool [n], the classes of each client."""
        known = counted & (labels[rows] >= 0)
        of_each = owners[known] * num_classes + labels[rows[known]]
        return np.bincount(of_each, minlength=number * num_classes).reshape(number, num_classes).astype(np.int32)

    return {
        "train": count(np.arange(len(labels))),
        "validation": count(partition.validation_index),
        "server": count(partition.server_index),
        "clients": count_each(np.ones(len(rows), bool)),
        "labelled": count_each(is_labelled[rows]),
    }
