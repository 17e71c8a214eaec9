"""Data sources, which return the inputs and labels of a run as NumPy arrays on the host.

All return a `Dataset`: scikit-learn's handwritten digits; a user's npz file, npy files, folder of images, table or
Hugging Face data set; data sets of other packages; and those of TensorFlow Datasets. Normalisation constants, and
whether a horizontal flip keeps the class, are part of the `Dataset`.
"""

import string
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.base.errors import UserError, known_are, printable
from fedjax_ssl.base.files import expanded
from fedjax_ssl.data import folder, hugging_face, npz, packages, tables, tfds
from fedjax_ssl.data.content import checksums, row_sums
from fedjax_ssl.data.table import aligned
from fedjax_ssl.data.values import in_order


class Dataset(NamedTuple):
    """A data set for classification on the host; images unless `kind` says otherwise."""

    name: str  # name of the data set
    x_train: np.ndarray  # uint8 [N, H, W, C], training images, C = 1 or 3
    y_train: np.ndarray  # int32 [N], their labels, 0 .. num_classes - 1; -1 for missing labels
    x_test: np.ndarray  # uint8 [T, H, W, C], test images
    y_test: np.ndarray  # int32 [T], their labels
    num_classes: int  # number of classes
    mean: tuple[float, ...]  # per channel, in units of [0, 1] pixel values
    std: tuple[float, ...]  # per channel, in the same units, never 0
    flip: bool  # whether a horizontal flip keeps an image's class
    class_names: tuple[str, ...] = ()  # the classes' names, in the order of the labels; () if unknown
    # The kind of inputs, see `fedjax_ssl.data.kinds`: arrays are [N, ...] in the stored form of the kind.
    kind: str = "image"
    details: Mapping[str, Any] = {}  # what users of the model must know about inputs of this kind, besides mean and std
    owners: np.ndarray | None = None  # int32 [N], the client of each training row, for the partition 'natural'
    domains: tuple[np.ndarray, ...] = ()  # the names of the training and of the test rows' domains, str; () if none
    # The names of the training rows' and of the test rows' files, or of their rows in a file; () if there are none.
    files: tuple[tuple[str, ...], ...] = ()
    unknown_test: np.ndarray | None = None  # [U, ...], test inputs of no class, see `unknown.set_apart`
    # uint64, see `content.row_sums`: of all training inputs, then of all test inputs, as `load_dataset` read them.
    row_sums: np.ndarray | None = None

    @property
    def lacks_labels(self) -> bool:
        """Whether some training examples have no label of a known class."""
        return bool((self.y_train < 0).any())

    @property
    def tested_domains(self) -> tuple[str, ...]:
        """The names of the test examples' domains, in order; () if the data name none."""
        return in_order(self.domains[1].tolist()) if self.domains else ()


# The constants of CIFAR and SVHN are from SemiFL (Diao et al., NeurIPS 2022). Its std of CIFAR-10 is, as in most code,
# the mean of the deviations of single images, not the deviation over all pixels. The constants of MNIST, Fashion-MNIST
# and EMNIST are the usual ones over all pixels of the training images.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "cifar10": {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010), "flip": True},
    "cifar100": {"mean": (0.5071, 0.4865, 0.4409), "std": (0.2673, 0.2564, 0.2762), "flip": True},
    "svhn_cropped": {"mean": (0.4377, 0.4438, 0.4728), "std": (0.1980, 0.2010, 0.1970), "flip": False},
    "mnist": {"mean": (0.1307,), "std": (0.3081,), "flip": False},
    "fashion_mnist": {"mean": (0.2860,), "std": (0.3530,), "flip": True},
    "emnist/byclass": {
        "mean": (0.1736,), "std": (0.3317,), "flip": False,
        # TensorFlow Datasets has only numbers.
        "class_names": (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase),
    },
}  # fmt: skip

TEXTS = (packages.SCIPY_DOCS, *packages.CORPORA)
FORMATS = ("npz", "npy", "folder", "datasets", "csv")  # of a user's own data
MEDMNIST = tuple(f"medmnist/{name}" for name in packages.MEDMNIST)
SOURCES = ("digits", *FORMATS, *_PUBLISHED, *packages.TABLES, *TEXTS, *MEDMNIST)

# Fields that other sources would ignore -> the sources that read them.
READ_BY = {
    "path": (*FORMATS, *MEDMNIST),
    "image_size": ("folder", "datasets"),
    "test_path": ("csv",),
    **dict.fromkeys(("label_column", "client_column", "domain_column"), ("csv", "datasets", "folder")),
    "tokenizer": ("csv", *TEXTS),
}


def load_dataset(config: Any, tell: Callable[[str], Any] = lambda text: None) -> Dataset:
    """Loads the data set that the section `data` names; `tell` is called with lines about the progress of decoding.

    With `normalisation='none'` its means are 0 and its deviations 1, so that pixels stay from 0 to 1; with 'cifar10' it
    has the constants of CIFAR-10. Raises a UserError if the source is unknown or would ignore a field, the file or
    folder is missing or malformed, or a published data set is neither on disk nor can be downloaded.
    """
    _check_fields(config)
    dataset = _load(config, tell)
    if not (len(dataset.y_train) and len(dataset.y_test)):
        rows = "with a label to test" if len(dataset.y_train) else "to train on"
        raise UserError(f"{config.test_path or config.path} has no row {rows}")
    name = printable(dataset.name)  # it may have bytes that are not UTF-8
    dataset = dataset._replace(name=name, x_train=aligned(dataset.x_train), x_test=aligned(dataset.x_test))
    if dataset.row_sums is None:
        dataset = dataset._replace(row_sums=np.concatenate([row_sums(dataset.x_train), row_sums(dataset.x_test)]))
    if config.normalisation == "none":
        return dataset._replace(mean=(0.0,) * len(dataset.mean), std=(1.0,) * len(dataset.std))
    if config.normalisation == "own":
        return dataset
    if dataset.kind != "image" or dataset.x_train.shape[-1] != 3:
        raise UserError(f"data.normalisation='cifar10' is for images of 3 channels; {config.source} has others")
    return dataset._replace(mean=_PUBLISHED["cifar10"]["mean"], std=_PUBLISHED["cifar10"]["std"])


def source_of(path: str) -> str:
    """The format of a user's own data, by the name of a file or the content of a folder: one of `FORMATS`."""
    place = expanded(path)
    if not place.is_dir():
        return "npz" if place.suffix.lower() == ".npz" else "csv"
    if (place / "x_train.npy").exists():
        return "npy"
    if any((place / name).exists() for name in ("dataset_dict.json", "state.json")):
        return "datasets"
    return "datasets" if any(file.suffix.lower() == tables.PARQUET for file in place.rglob("*")) else "folder"


def _check_fields(config: Any) -> None:
    """Raises a UserError for an unknown source, or for a field that the source would ignore."""
    if config.source not in SOURCES:
        raise UserError(f"data.source is {config.source!r}{known_are(config.source, SOURCES)}")
    for field, sources in READ_BY.items():
        if config[field] and config.source not in sources:
            line = f"is for data.source={' or '.join(sources[:5])}; {config.source} does not read it"
            raise UserError(f"data.{field}={config[field]} {line}")
    if config.source == "csv" and config.tokenizer and not config.text_column:
        raise UserError(f"data.tokenizer={config.tokenizer} is for texts; name their column in data.text_column")


def _load(config: Any, tell: Callable[[str], Any]) -> Dataset:
    source, path = config.source, config.path

    def of_images(name: str, fields: Mapping[str, Any]) -> Dataset:
        mean, std = channel_statistics(fields["x_train"])
        return Dataset(name, **fields, mean=mean, std=std, flip=bool(config.flip))

    if source == "digits":
        return _load_digits()
    if source in ("npz", "npy"):
        fields = npz.load_npz(path) if source == "npz" else npz.load_npy(path)
        name = expanded(path).resolve().name.removesuffix(".npz")
        if fields["x_train"].dtype == np.uint8:
            return of_images(name, fields)
        return Dataset(name, **fields, **_of_arrays(fields["x_train"], fields["x_test"], config), flip=False)
    if source == "folder":
        return of_images(expanded(path).resolve().name, folder.load_folder(config, tell))
    if source == "datasets":
        return of_images(expanded(path).stem, hugging_face.load_datasets(config, tell))
    if source == "csv":
        return Dataset(expanded(path).stem, **tables.load_table(config), flip=False)
    if source in _PUBLISHED:
        return Dataset(source, **(tfds.load_tfds(source) | _PUBLISHED[source]))
    if source in packages.TABLES:
        return Dataset(source, **packages.load_sklearn(source), flip=False)
    if source in TEXTS:
        return Dataset(source, **packages.load_corpus(source, config), flip=False)
    name = source.removeprefix("medmnist/")
    return of_images(name, packages.load_medmnist(name, path))


def _of_arrays(x_train: np.ndarray, x_test: np.ndarray, config: Any) -> dict[str, Any]:
    """The kind, facts and statistics of features (floats) or texts (integers) in an npz."""
    if np.issubdtype(x_train.dtype, np.integer):
        return tables.of_texts(x_train, int(max(x_train.max(), x_test.max())) + 1, config.weak_views, {})
    mean, std = feature_statistics(x_train.reshape(len(x_train), -1, x_train.shape[-1]))
    details = {"shape": list(x_train.shape[1:]), "weak_views": tables.checked_views(config.weak_views, x_train)}
    return {"kind": "features", "mean": mean, "std": std, "details": details}


def dataset_facts(dataset: Dataset) -> dict[str, Any]:
    """What users of a trained model must know about its inputs."""
    of_images = {"image_shape": list(dataset.x_train.shape[1:]), "flip": dataset.flip}
    return {
        "name": dataset.name,
        "num_classes": dataset.num_classes,
        "class_names": list(dataset.class_names),
        **(of_images if dataset.kind == "image" else {"kind": dataset.kind}),
        **dataset.details,
        "mean": list(dataset.mean),
        "std": list(dataset.std),
        "num_train": len(dataset.x_train),
        "num_test": len(dataset.x_test),
        **({} if dataset.row_sums is None else {"content": checksums(dataset)}),
    }


def feature_statistics(views: np.ndarray, of_one_unit: bool = False) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and the standard deviation of each of D features over all views of all examples.

    A constant feature gets the standard deviation 1.

    Args:
        views: float32 [N, V, D].
        of_one_unit: whether the features have the same unit, as those of an encoder do. They then share one deviation,
            the root of their mean variance. With separate deviations, a feature that is almost constant would weigh as
            much as any other, and be thousands of deviations large in some view.
    """
    mean = views.mean(axis=(0, 1), dtype=np.float64)
    squares = np.zeros_like(mean)
    for start in range(0, len(views), 1024):  # in blocks: the differences are in float64
        squares += np.square(views[start : start + 1024] - mean).sum(axis=(0, 1))
    variance = squares / (views.shape[0] * views.shape[1])
    std = np.sqrt(np.full_like(variance, variance.mean()) if of_one_unit else variance)
    return tuple(mean.tolist()), tuple(np.where(std == 0, 1.0, std).tolist())


def channel_statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and the standard deviation of each channel over all pixels of images, uint8 [N, H, W, C].

    Both are in units of [0, 1] pixel values. A constant channel gets the standard deviation 1.
    """
    channels = images.shape[-1]
    # Integer counts of each value, so that the constants do not depend on the order of the images.
    counts = np.zeros((channels, 256), np.int64)
    pixels, values = images.reshape(-1, channels), np.arange(256)
    for start in range(0, len(pixels), 2**16):
        for channel, of_channel in enumerate(pixels[start : start + 2**16].T):
            counts[channel] += np.bincount(of_channel, minlength=256)
    total, total_of_squares = counts @ values, counts @ values**2
    count = images.size // channels
    # count^2 times the variance, in Python's integers: no cancellation and no overflow.
    spread = [count * int(square) - int(one) ** 2 for one, square in zip(total, total_of_squares)]
    std = tuple(value**0.5 / count / 255 if value > 0 else 1.0 for value in spread)
    return tuple(int(one) / count / 255 for one in total), std


def _load_digits() -> Dataset:
    """Loads scikit-learn's handwritten digits, always split into the same 1437 training and 360 test images.

    Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Repository, 1998.
    """
    rows, labels = packages.read_digits()
    images = np.round(rows * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    is_test = packages.every_fifth(labels)
    arrays = images[~is_test], labels[~is_test], images[is_test], labels[is_test]
    statistics = channel_statistics(arrays[0])
    return Dataset("digits", *arrays, 10, *statistics, flip=False, class_names=tuple(string.digits))
