"""Data sources: where the inputs and labels of a run come from, as host NumPy arrays.

All give the same `Dataset`: scikit-learn's embedded handwritten digits, an npz file, a folder of images or a table of
the user's own, what other packages ship, and the published data sets of TensorFlow Datasets. Normalisation constants,
and whether a horizontal flip makes sense, belong to the data set and travel with it.
"""

import string
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.data import folder, npz, packages, tables, tfds
from fedjax_ssl.data.arrays import Arrays
from fedjax_ssl.errors import UserError, known_are
from fedjax_ssl.files import expanded


class Dataset(NamedTuple):
    """A data set for classification, on the host; of images, unless `kind` says otherwise."""

    name: str  # name of the data set
    x_train: np.ndarray  # uint8 [N, H, W, C], training images, C = 1 or 3
    y_train: np.ndarray  # int32 [N], their labels, 0 .. num_classes - 1; -1 where the data set has none
    x_test: np.ndarray  # uint8 [T, H, W, C], test images
    y_test: np.ndarray  # int32 [T], their labels
    num_classes: int  # number of classes
    mean: tuple[float, ...]  # per channel, in units of [0, 1] pixel values
    std: tuple[float, ...]  # per channel, in the same units, never 0
    flip: bool  # whether an image flipped horizontally is still an image of its class
    class_names: tuple[str, ...] = ()  # the classes' names, in the order of the labels; () if unknown
    kind: str = "image"  # of the inputs, see `fedjax_ssl.kinds`: the arrays are [N, ...] of the type that it stores
    details: Mapping[str, Any] = {}  # what a user of the model must know of inputs of this kind, besides mean and std
    owners: np.ndarray | None = None  # int32 [N], the client of each training row, of the partition 'natural'


class _Facts(NamedTuple):
    """The facts about a published data set."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool
    class_names: tuple[str, ...] = ()  # of data sets for which TensorFlow Datasets has only numbers


# The constants of CIFAR and SVHN are those of SemiFL (Diao et al., NeurIPS 2022); its std of CIFAR-10 is, as
# almost everywhere, the mean of the images' own deviations and not the deviation over all pixels. Those of
# MNIST, Fashion-MNIST and EMNIST are the customary ones, over all pixels of the training images.
_PUBLISHED = {
    "cifar10": _Facts((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), flip=True),
    "cifar100": _Facts((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), flip=True),
    "svhn_cropped": _Facts((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970), flip=False),
    "mnist": _Facts((0.1307,), (0.3081,), flip=False),
    "fashion_mnist": _Facts((0.2860,), (0.3530,), flip=True),
    "emnist/byclass": _Facts(
        (0.1736,), (0.3317,), flip=False, class_names=(*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)
    ),
}

SOURCES = (
    "digits", "npz", "folder", "csv", *_PUBLISHED, *packages.TABLES, *packages.CORPORA,
    *(f"medmnist/{name}" for name in packages.MEDMNIST),
)  # fmt: skip


# Of `data.normalisation`: means and deviations of the pixels, in place of the data set's own.
NORMALISATIONS: dict[str, dict[str, Any]] = {
    "own": {},
    "cifar10": {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)},
}


def load_dataset(config: Any) -> Dataset:
    """Loads the data set that a configuration names.

    Args:
        config: the `data` section. Read are `source` (one of `SOURCES`); for an npz and a folder `path` and `flip`,
          for a folder `image_size` and `fit`, too; for
          a csv see `tables.load_table`; for a published data set `tfds_dir`, the folder of TensorFlow
          Datasets ('' = its default); `balanced_test`; `standardise`; and `normalisation` (one of `NORMALISATIONS`).

    Returns:
        The data set; unless `standardise`, with means of 0 and deviations of 1, which leave pixels from 0 to 1; with
        `normalisation` 'cifar10' with those of CIFAR-10; with `balanced_test` the first test images of each class, as
        many as the smallest class has.

    Raises:
        UserError: the source is unknown, the file or folder is missing or malformed, or a published data set is neither
          on the disk nor within reach of the network.
    """
    dataset = _load(config)
    if config.balanced_test:
        rows = first_of_each_class(dataset.y_test)
        dataset = dataset._replace(x_test=dataset.x_test[rows], y_test=dataset.y_test[rows])
    if dataset.kind != "image":
        return dataset if config.standardise else _unscaled(dataset)
    channels, name = dataset.x_train.shape[-1], config.normalisation
    if name != "own" and (channels != 3 or not config.standardise):
        raise UserError(
            f"data.normalisation={name!r} is for standardised images of 3 channels; those of {config.source} have "
            f"{channels}, and data.standardise is {config.standardise}"
        )
    if name == "cifar10":
        return dataset._replace(**NORMALISATIONS[name])
    return dataset if config.standardise else _unscaled(dataset)


def _unscaled(dataset: Dataset) -> Dataset:
    """The data set with means of 0 and deviations of 1."""
    return dataset._replace(mean=(0.0,) * len(dataset.mean), std=(1.0,) * len(dataset.std))


def _load(config: Any) -> Dataset:
    if config.source == "digits":
        return _load_digits()
    if config.source in ("npz", "folder"):
        one = config.source == "npz"
        path = expanded(config.path).resolve()
        arrays = npz.load_npz(config.path) if one else folder.load_folder(config.path, config.image_size, config.fit)
        if one and arrays.x_train.dtype != np.uint8:
            return Dataset(path.stem, **_of_arrays(arrays, config), flip=False)
        mean, std = channel_statistics(arrays.x_train)
        return Dataset(path.stem if one else path.name, **arrays._asdict(), mean=mean, std=std, flip=bool(config.flip))
    if config.source in _PUBLISHED:
        facts = _PUBLISHED[config.source]._asdict()
        published = tfds.load_tfds(config.source, config.tfds_dir)._asdict()
        facts["class_names"] = facts["class_names"] or published["class_names"]
        return Dataset(config.source, **(published | facts))
    if config.source == "csv":
        return Dataset(expanded(config.path).stem, **tables.load_table(config), flip=False)
    if config.source in packages.TABLES:
        return Dataset(config.source, **packages.load_sklearn(config.source), flip=False)
    if config.source in packages.CORPORA:
        return Dataset(config.source, **packages.load_corpus(config.source, config), flip=False)
    if config.source in SOURCES:
        name = config.source.removeprefix("medmnist/")
        fields = packages.load_medmnist(name, config.path)
        mean, std = channel_statistics(fields["x_train"])
        return Dataset(name, **fields, mean=mean, std=std, flip=bool(config.flip))
    raise UserError(f"data.source is {config.source!r}{known_are(config.source, SOURCES)}")


def _of_arrays(arrays: Arrays, config: Any) -> dict[str, Any]:
    """Features, which are floats, or texts, which are integers, of an npz: the fields of `Dataset` but the name."""
    fields, x_train, x_test = arrays._asdict(), arrays.x_train, arrays.x_test
    if np.issubdtype(x_train.dtype, np.integer):
        num_tokens = int(max(x_train.max(), x_test.max())) + 1
        return {**fields, **tables.as_texts(x_train, x_test, num_tokens, config.weak_views, {})}
    first = x_train.reshape(len(x_train), -1, x_train.shape[-1])[:, 0].astype(np.float64)
    std = first.std(axis=0)
    return {
        **fields,
        "kind": "features",
        "mean": tuple(first.mean(axis=0).tolist()),
        "std": tuple(np.where(std == 0, 1.0, std).tolist()),
        "details": {
            "shape": list(x_train.shape[1:]),
            "weak_views": tables.checked_views(config.weak_views, x_train),
        },
    }


def first_of_each_class(labels: np.ndarray) -> np.ndarray:
    """Rows of the first examples of each class that occurs, as many as the smallest has: int [n], ascending."""
    rows = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    return np.sort(np.concatenate([of_class[: min(map(len, rows))] for of_class in rows]))


def dataset_facts(dataset: Dataset) -> dict[str, Any]:
    """What a trained model's user must know about its inputs."""
    known = {
        "name": dataset.name,
        "num_classes": dataset.num_classes,
        "class_names": list(dataset.class_names),
    }
    if dataset.kind != "image":
        scale = {"mean": list(dataset.mean), "std": list(dataset.std)}
        counts = {"num_train": len(dataset.x_train), "num_test": len(dataset.x_test)}
        return {**known, "kind": dataset.kind, **dataset.details, **scale, **counts}
    return {
        **known,
        "image_shape": list(dataset.x_train.shape[1:]),
        "mean": list(dataset.mean),
        "std": list(dataset.std),
        "flip": dataset.flip,
        "num_train": len(dataset.x_train),
        "num_test": len(dataset.x_test),
    }


def channel_statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Computes the mean and the standard deviation of each channel over all pixels of all images.

    Args:
        images: uint8 [N, H, W, C].

    Returns:
        Mean and standard deviation, C values each, in units of [0, 1] pixel values. A constant channel
        cannot be scaled: its standard deviation is given as 1.
    """
    channels = images.shape[-1]
    total = np.zeros(channels, np.int64)
    total_of_squares = np.zeros(channels, np.int64)
    # Integer sums are exact, so that the constants do not depend on the order of the images; chunks keep
    # the wider copies small.
    for start in range(0, len(images), 1024):
        pixels = images[start : start + 1024].reshape(-1, channels).astype(np.int64)
        total += pixels.sum(axis=0)
        total_of_squares += (pixels**2).sum(axis=0)
    count = images.size // channels
    # count^2 times the variance, in Python's integers: no cancellation and no overflow.
    spread = [count * int(square) - int(one) ** 2 for one, square in zip(total, total_of_squares)]
    mean = tuple(int(one) / count / 255 for one in total)
    std = tuple(value**0.5 / count / 255 if value > 0 else 1.0 for value in spread)
    return mean, std


def _load_digits() -> Dataset:
    """Loads scikit-learn's embedded handwritten digits, split once and for all into 1437 and 360 images.

    Sorted by class (keeping the order within a class), every fifth example is for the test: stratified to
    within one example a class, and the same for every seed and version of NumPy.

    Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Repository, 1998.
    """
    from sklearn import datasets  # Takes a second; only this source needs it.

    digits = datasets.load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]  # [1797, 8, 8, 1]
    labels = digits.target.astype(np.int32)
    is_test = packages.every_fifth(labels)
    x_train = images[~is_test]
    mean, std = channel_statistics(x_train)
    return Dataset(
        "digits",
        x_train,
        labels[~is_test],
        images[is_test],
        labels[is_test],
        10,
        mean,
        std,
        flip=False,
        class_names=tuple(string.digits),
    )
