"""Unknown images: images of no class of the model, held by clients without labels and kept apart in the test set.

Their true label is `UNKNOWN`. They are images of classes that the model leaves out, or of a second data set.
"""

from typing import Any

import numpy as np

from fedjax_ssl.data.owners import UNKNOWN, Partition
from fedjax_ssl.data.sources import FORMATS, Dataset
from fedjax_ssl.errors import UserError

# Facts that give a data set's numbers their meaning; two data sets can be joined only if they agree.
_MEANINGS = ("columns", "categories", "vocabulary")
CLASS_DRAW, DEAL = 102, 103  # folded into the seed; the partition and the attackers use other numbers


def has_unknown(config: Any) -> bool:
    """Whether the `data` section, a dict or a ConfigDict, gives a run unknown images."""
    return bool(config["unknown_classes"] or config["unknown_drawn"] or config["unknown_source"])


def check_unknown(config: Any, num_seeds: int) -> None:
    """Checks the fields of unknown images against other fields.

    Args:
        config: the `data` section.
        num_seeds: number of seeds that share a program.

    Raises:
        UserError: fields exclude each other.
    """
    if not has_unknown(config):
        return
    if len(config.unknown_classes) and config.unknown_drawn:
        raise UserError(
            f"data.unknown_classes={tuple(config.unknown_classes)} and data.unknown_drawn={config.unknown_drawn} "
            "exclude each other; leave one out"
        )
    if config.unknown_source in FORMATS:
        raise UserError(
            f"data.unknown_source={config.unknown_source!r} is a format; name a data set, an npz or a folder"
        )
    if config.unknown_source and config.unknown_source in (config.source, config.path):
        raise UserError(
            f"data.unknown_source={config.unknown_source!r} is the data set itself, whose classes are known"
        )
    if config.unknown_drawn and num_seeds > 1:
        raise UserError(
            f"data.unknown_drawn={config.unknown_drawn} draws other classes for each of {num_seeds} seeds, which share "
            "their test set; name data.unknown_classes, or train each seed on its own"
        )
    if config.partition == "natural" or config.partition_file:
        which = "data.partition_file" if config.partition_file else "data.partition='natural'"
        raise UserError(f"{which} says who holds what, but unknown images are dealt to clients; leave one of them out")


def set_apart(dataset: Dataset, other: Dataset | None, config: Any, seed: int) -> Dataset:
    """Labels unknown training images with `UNKNOWN` and separates unknown test images.

    Args:
        dataset: the data set.
        other: a second data set, all of whose images are unknown; None: there is none.
        config: the `data` section. It reads `unknown_classes`, or `unknown_drawn`, a number of classes to draw.
        seed: seed of the draw.

    Returns:
        The data set with the remaining classes, renumbered in their order. Training images of the second data set
        follow its own; test images are those of known classes, and `unknown_test` holds the others.

    Raises:
        UserError: there is no such class, fewer than two classes or no unknown test images remain, or the second data
            set has inputs of another shape or meaning.
    """
    number, unknown = dataset.num_classes, np.array(sorted(config.unknown_classes), int)
    if config.unknown_drawn:
        unknown = np.random.default_rng([seed, CLASS_DRAW]).permutation(number)[: config.unknown_drawn]
    if len(unknown) and np.max(unknown) >= number:
        raise UserError(f"data.unknown_classes has {np.max(unknown)}, but the data have the classes 0 to {number - 1}")
    kept = np.setdiff1d(np.arange(number), unknown)
    if len(kept) < 2:
        raise UserError(f"of {number} classes {len(kept)} would be known to the model, which needs at least 2")
    renumbered = np.full(number, UNKNOWN, np.int32)
    renumbered[kept] = np.arange(len(kept))
    x_train, y_train, y_test = (
        dataset.x_train,
        *(np.where(y < 0, -1, renumbered[y]).astype(np.int32) for y in (dataset.y_train, dataset.y_test)),
    )
    apart = dataset.x_test[y_test == UNKNOWN]
    if other is not None:
        for ours, theirs in ((dataset.x_train, other.x_train), (dataset.x_test, other.x_test)):
            if (ours.shape[1:], ours.dtype) != (theirs.shape[1:], theirs.dtype):
                raise UserError(
                    f"data.unknown_source={config.unknown_source!r} has inputs of {theirs.dtype} "
                    f"{list(theirs.shape[1:])}, the data {ours.dtype} {list(ours.shape[1:])}; they must be alike"
                )
        ours, theirs = ((each.kind, *map(each.details.get, _MEANINGS)) for each in (dataset, other))
        if ours != theirs:
            raise UserError(
                f"data.unknown_source={config.unknown_source!r} has other columns, categories or words than the data"
            )
        number_of_theirs, number_of_ours = (each.details.get("num_tokens", 0) for each in (other, dataset))
        if number_of_theirs > number_of_ours:
            raise UserError(
                f"data.unknown_source={config.unknown_source!r} has the token {number_of_theirs - 1}, but those of the "
                f"data are below {number_of_ours}; they must be of one vocabulary"
            )
        x_train = np.concatenate([x_train, other.x_train])
        y_train = np.concatenate([y_train, np.full(len(other.x_train), UNKNOWN, np.int32)])
        apart = np.concatenate([apart, other.x_test])
    if not len(apart):
        raise UserError("no test image is of an unknown class, so nothing could tell how well the model knows them")
    names = dataset.class_names or tuple(map(str, range(number)))
    return dataset._replace(
        x_train=x_train,
        y_train=y_train,
        x_test=dataset.x_test[y_test != UNKNOWN],
        y_test=y_test[y_test != UNKNOWN],
        num_classes=len(kept),
        class_names=tuple(names[label] for label in kept),
        unknown_test=apart,
        test_rows=None if dataset.test_rows is None else dataset.test_rows[y_test != UNKNOWN],
    )


def deal_unknown(labels: np.ndarray, partition: Partition, config: Any, seed: int) -> Partition:
    """Deals unknown images to the clients of a partition, in addition to the images that they have.

    A client with n images gets n s / (1 - s) unknown images, rounded with halves up, where s is `unknown_share`: a
    share s of each client's images is then unknown. They are drawn regardless of their classes. With `labels`
    'some_clients' the labelled clients get none.

    Args:
        labels: int [N], labels of the training set, `UNKNOWN` for unknown images.
        partition: the partition of all other images.
        config: the `data` section.
        seed: seed of the draw, which is independent of the partition's.

    Raises:
        UserError: there are too few unknown images.
    """
    rng, share = np.random.default_rng([seed, DEAL]), config.unknown_share
    sizes = np.array([len(rows) for rows in partition.client_rows])
    if config.labels == "some_clients":
        sizes[[bool(np.isin(rows, partition.labelled_rows).any()) for rows in partition.client_rows]] = 0
    numbers = np.floor(sizes * share / (1 - share) + 0.5).astype(int)
    pool = rng.permutation(np.flatnonzero(labels == UNKNOWN))
    if numbers.sum() > len(pool):
        raise UserError(
            f"data.unknown_share={share:g} takes {numbers.sum()} unknown images, but there are {len(pool)}; lower it, "
            "or data.examples_per_client"
        )
    dealt = np.split(pool[: numbers.sum()], np.cumsum(numbers)[:-1])
    rows = [rng.permutation(np.append(known, own)).astype(np.int32) for known, own in zip(partition.client_rows, dealt)]
    return partition._replace(client_rows=rows)
