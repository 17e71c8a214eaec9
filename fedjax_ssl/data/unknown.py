"""Unknown images: images of no class of the model, held by clients without labels and kept apart in the test set.

Their true label is `UNKNOWN`. They are images of classes that the model leaves out.
"""

from typing import Any

import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data.owners import UNKNOWN, Partition
from fedjax_ssl.data.sources import Dataset

DEAL = 103  # folded into the seed; the partition and the attackers use other numbers


def check_unknown(config: Any) -> None:
    """Raises a UserError if other fields of the `data` section exclude unknown images."""
    if config.unknown_classes and (config.partition == "natural" or config.partition_file):
        which = "data.partition_file" if config.partition_file else "data.partition='natural'"
        raise UserError(f"{which} says who holds what, but unknown images are dealt to clients; leave one of them out")


def set_apart(dataset: Dataset, config: Any) -> Dataset:
    """Labels unknown training images with `UNKNOWN` and separates unknown test images.

    The result has the classes that are not `unknown_classes`, renumbered in their order. Its test images are those of
    known classes, and `unknown_test` holds the others. Raises a UserError if there is no such class, or fewer than two
    classes or no unknown test images remain.
    """
    number, unknown = dataset.num_classes, np.array(sorted(config.unknown_classes), int)
    kept = np.setdiff1d(np.arange(number), unknown)
    if len(kept) + len(unknown) > number or len(kept) < 2:
        has = f"the data have the classes 0 to {number - 1}, of which the model needs to know at least 2"
        raise UserError(f"data.unknown_classes={tuple(map(int, unknown))}: {has}")
    renumbered = np.full(number, UNKNOWN, np.int32)
    renumbered[kept] = np.arange(len(kept))
    y_train, y_test = (np.where(y < 0, -1, renumbered[y]).astype(np.int32) for y in (dataset.y_train, dataset.y_test))
    apart = dataset.x_test[y_test == UNKNOWN]
    if not len(apart):
        raise UserError("no test image is of an unknown class, so nothing could tell how well the model knows them")
    files = dataset.files and (dataset.files[0], tuple(np.array(dataset.files[1])[y_test != UNKNOWN].tolist()))
    domains = dataset.domains and (dataset.domains[0], dataset.domains[1][y_test != UNKNOWN])
    names = dataset.class_names or tuple(map(str, range(number)))
    return dataset._replace(
        y_train=y_train,
        x_test=dataset.x_test[y_test != UNKNOWN],
        y_test=y_test[y_test != UNKNOWN],
        num_classes=len(kept),
        class_names=tuple(names[label] for label in kept),
        unknown_test=apart,
        files=files,
        domains=domains,
    )


def deal_unknown(labels: np.ndarray, partition: Partition, config: Any, seed: int) -> Partition:
    """Deals unknown images to the clients of a partition, in addition to the images that they have.

    A client with n images gets n s / (1 - s) unknown images, rounded with halves up, where s is `unknown_share`: a
    share s of each client's images is then unknown. They are drawn regardless of their classes, by the seed, but
    independently of the partition. With `labels` 'some_clients' the labelled clients get none. Raises a UserError if
    there are too few unknown images.

    The labels of the training set are int [N], `UNKNOWN` for unknown images; `config` is the section `data`.
    """
    rng, share = np.random.default_rng([seed, DEAL]), config.unknown_share
    sizes = np.array([len(rows) for rows in partition.client_rows])
    if config.labels == "some_clients":
        sizes[[bool(np.isin(rows, partition.labelled_rows).any()) for rows in partition.client_rows]] = 0
    numbers = np.floor(sizes * share / (1 - share) + 0.5).astype(int)
    pool = rng.permutation(np.flatnonzero(labels == UNKNOWN))
    if numbers.sum() > len(pool):
        takes = f"takes {numbers.sum()} unknown images, but there are {len(pool)}"
        raise UserError(f"data.unknown_share={share:g} {takes}; lower it, or data.examples_per_client")
    dealt = np.split(pool[: numbers.sum()], np.cumsum(numbers)[:-1])
    rows = [rng.permutation(np.append(known, own)).astype(np.int32) for known, own in zip(partition.client_rows, dealt)]
    return partition._replace(client_rows=rows)
