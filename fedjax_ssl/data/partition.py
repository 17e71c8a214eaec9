"""Who holds which training examples: the anchors and the clients' shares, as rows of the training set.

Pure NumPy, and a function of the labels, the configuration and the seed. A partition can be saved and used
again from its file.
"""

import os
import pathlib
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.data import npz
from fedjax_ssl.data.partition_schemes import PARTITIONS
from fedjax_ssl.errors import UserError
from fedjax_ssl.files import replace_arrays

__all__ = [
    "PARTITIONS",
    "Partition",
    "class_counts",
    "draw_anchors",
    "load_partition",
    "make_partition",
    "save_partition",
]

ANCHOR_DRAWS = ("balanced", "random")
_FILE_KEYS = ("anchor_index", "client_index", "client_size")


class Partition(NamedTuple):
    """Rows of the training set, by owner; no row has two owners.

    Attributes:
        anchor_index: int32 [S], rows of the labelled examples that the server holds, in random order.
        client_rows: K arrays int32 [n_k], rows of each client, in random order.
    """

    anchor_index: np.ndarray
    client_rows: list[np.ndarray]


def draw_anchors(
    labels: np.ndarray, num_anchors: int, num_classes: int, rng: np.random.Generator, balanced: bool
) -> np.ndarray:
    """Draws the anchors, the labelled examples of the server.

    Args:
        labels: int [N], labels of the training set.
        num_anchors: number of anchors S.
        num_classes: number of classes C.
        rng: source of randomness.
        balanced: whether each class has exactly S / C anchors; else they are drawn regardless of their classes.

    Returns:
        int32 [S], rows of the training set, in random order.

    Raises:
        UserError: S is not a multiple of C, or there are more anchors than examples (balanced: of a class).
    """
    if num_anchors < 0:
        raise UserError(f"data.num_anchors={num_anchors} must not be negative")
    if num_anchors > len(labels):
        raise UserError(f"data.num_anchors={num_anchors} is more than the {len(labels)} training examples")
    if not balanced:
        return rng.permutation(len(labels))[:num_anchors].astype(np.int32)
    per_class, remainder = divmod(num_anchors, num_classes)
    if remainder:
        below, above = per_class * num_classes, (per_class + 1) * num_classes
        raise UserError(
            f"data.num_anchors={num_anchors} cannot be the same for each of {num_classes} classes; "
            f"{f'{below} or {above}' if below else above} would do, or data.anchors='random'"
        )
    drawn = []
    for c in range(num_classes):
        rows = np.flatnonzero(labels == c)
        if per_class > len(rows):
            raise UserError(
                f"data.num_anchors={num_anchors} takes {per_class} examples of each class, but class {c} has "
                f"{len(rows)}; lower data.num_anchors, or use data.anchors='random'"
            )
        drawn.append(rng.permutation(rows)[:per_class])
    # Shuffled, so that consecutive batches of the anchors are not of a single class.
    return rng.permutation(np.concatenate(drawn)).astype(np.int32)


def make_partition(labels: np.ndarray, num_classes: int, config: Any, num_clients: int, seed: int) -> Partition:
    """Draws the anchors, removes them, and splits the rest of the training set over the clients.

    Args:
        labels: int [N], labels of the training set.
        num_classes: number of classes.
        config: the `data` section. Read are `num_anchors`; `anchors` ('balanced' or 'random'); `partition` (a
          name of `PARTITIONS`) with its own fields `alpha` or `classes_per_client`; `examples_per_client`, the
          most a client keeps, taken at random from its share (0 = all); and `partition_file`, a saved partition
          that is used as it is instead ('' = none).
        num_clients: number of clients K.
        seed: seed of the draw. The anchors depend on it alone, so that partitions can be compared.

    Returns:
        The partition.

    Raises:
        UserError: a field has an impossible value, or there are not enough examples.
    """
    if num_clients < 1:
        raise UserError(f"num_clients={num_clients} must be at least 1")
    if config.partition_file:
        return load_partition(config.partition_file, len(labels), num_clients, config.num_anchors)
    if config.partition not in PARTITIONS:
        raise UserError(f"unknown data.partition {config.partition!r}; known: {', '.join(PARTITIONS)}")
    if config.anchors not in ANCHOR_DRAWS:
        raise UserError(f"unknown data.anchors {config.anchors!r}; known: {', '.join(ANCHOR_DRAWS)}")
    if config.examples_per_client < 0:
        raise UserError(f"data.examples_per_client={config.examples_per_client} must be 0 (all) or more")
    if seed < 0:
        raise UserError(f"seed={seed} must not be negative")

    labels = np.asarray(labels)
    anchor_rng, client_rng = (np.random.default_rng([seed, stream]) for stream in range(2))
    anchors = draw_anchors(labels, config.num_anchors, num_classes, anchor_rng, config.anchors == "balanced")
    rest = np.setdiff1d(np.arange(len(labels)), anchors)
    if num_clients > len(rest):
        raise UserError(
            f"num_clients={num_clients} is more than the {len(rest)} examples that {len(anchors)} anchors "
            f"leave of {len(labels)}; lower num_clients or data.num_anchors"
        )
    shares = PARTITIONS[config.partition](labels[rest], num_clients, config, client_rng)
    limit = config.examples_per_client or len(labels)
    client_rows = [rest[client_rng.permutation(share)[:limit]].astype(np.int32) for share in shares]
    return Partition(anchors, client_rows)


def class_counts(labels: np.ndarray, partition: Partition, num_classes: int) -> dict[str, np.ndarray]:
    """Who holds what: examples of each class, for pictures and reports.

    Args:
        labels: int [N], labels of the training set.
        partition: its owners.
        num_classes: number of classes C.

    Returns:
        `train`, int [C], the whole training set; `anchors`, int [C], the server's part of it; `clients`, int [K, C].
    """

    def count(rows: np.ndarray) -> np.ndarray:
        return np.bincount(labels[rows], minlength=num_classes)

    return {
        "train": np.bincount(labels, minlength=num_classes),
        "anchors": count(partition.anchor_index),
        "clients": np.stack([count(rows) for rows in partition.client_rows]),
    }


def save_partition(path: str | os.PathLike, partition: Partition) -> None:
    """Writes a partition to an npz file, at once or not at all.

    Args:
        path: the file to be written. It holds anchor_index [S], client_size [K], and client_index, the rows of
          all clients one after the other.
        partition: the partition.
    """
    replace_arrays(
        pathlib.Path(path),
        anchor_index=partition.anchor_index.astype(np.int32),
        client_index=np.concatenate(partition.client_rows).astype(np.int32),
        client_size=np.array([len(rows) for rows in partition.client_rows], np.int32),
    )


def load_partition(
    path: str | os.PathLike, num_examples: int, num_clients: int, num_anchors: int | None = None
) -> Partition:
    """Reads a partition that `save_partition` wrote, and checks it.

    Args:
        path: the npz file.
        num_examples: number of training examples N.
        num_clients: number of clients that it must have.
        num_anchors: number of anchors that it must have, if given.

    Returns:
        The partition.

    Raises:
        UserError: the file is missing or malformed, has another number of clients or anchors, names a row
          outside the training set, or gives a row to two owners.
    """
    arrays = npz.read_arrays(str(path), _FILE_KEYS, field="data.partition_file")
    for key, value in arrays.items():
        if value.ndim != 1 or not np.issubdtype(value.dtype, np.integer):
            raise UserError(f"{path}: {key} is {value.dtype} of shape {value.shape}; it must be integers [n]")
    anchors, rows, sizes = (arrays[key] for key in _FILE_KEYS)
    if len(sizes) != num_clients:
        raise UserError(f"{path} has {len(sizes)} clients, but num_clients={num_clients}")
    if num_anchors is not None and len(anchors) != num_anchors:
        raise UserError(f"{path} has {len(anchors)} anchors, but data.num_anchors={num_anchors}")
    if (sizes < 0).any() or sizes.sum() != len(rows):
        raise UserError(f"{path}: client_size must add up to the {len(rows)} rows of client_index, not {sizes.sum()}")
    owned = np.concatenate([anchors, rows])
    outside = owned[(owned < 0) | (owned >= num_examples)]
    if len(outside):
        raise UserError(f"{path} names row {outside[0]}, but the training set has {num_examples} examples")
    values, counts = np.unique(owned, return_counts=True)
    if (counts > 1).any():
        raise UserError(f"{path} names row {values[counts > 1][0]} more than once; a row has one owner")
    client_rows = np.split(rows.astype(np.int32), np.cumsum(sizes)[:-1])
    return Partition(anchors.astype(np.int32), client_rows)
