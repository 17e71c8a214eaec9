"""Loads images from a data set of Hugging Face's `datasets` on disk: a folder of `save_to_disk`, or parquet files.

    FOLDER of ds.save_to_disk, FILE.parquet, or a FOLDER of parquet files whose names begin with train and test

Arrow memory-maps the columns, and images are decoded only once, see `decode_once`. Nothing is downloaded.
"""

import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.base.errors import UserError, first_line
from fedjax_ssl.data.arrays import existing_path
from fedjax_ssl.data.decoded import decode_once
from fedjax_ssl.data.tables import check_classes, check_column, find_class_names, find_owners, for_test, known_codes


def load_datasets(config: Any, tell: Callable[[str], Any]) -> dict[str, Any]:
    """Loads the data set in `config.path`.

    Args:
        config: the `data` section. It reads `path`, `label_column`, `client_column`, `image_size` and `fit`.
        tell: called with a line about the progress of decoding.

    Returns:
        The fields of `Dataset` except the name, `mean`, `std` and `flip`. Without a split 'test', every fifth labelled
        row of each class is for testing. Splits with other names are ignored. A training row without a label gets -1; a
        test row without a label is left out. Classes are in the order of the label's `ClassLabel`, otherwise sorted.

    Raises:
        UserError: `datasets` is not installed, the path holds no such data set, a column is invalid, or a test row has
            a label that training lacks.
    """
    splits = _open(config.path)
    train = splits["train"]
    image, label = _image_column(config.path, train), config.label_column or _label_column(train)
    check_column(train.features, label, "label_column", config.path)
    check_column(train.features, config.client_column, "client_column", config.path, optional=True)
    given = {name: _labels(split, label, config.path) for name, split in splits.items()}
    names = getattr(train.features[label], "names", None) or find_class_names(given["train"], config.path, label)
    check_classes(names, config.path, label)
    labels = {name: known_codes(values, names, config.path, label) for name, values in given.items()}
    if "test" in splits:
        rows = {"train": np.arange(len(train)), "test": np.flatnonzero(labels["test"] >= 0)}
    else:
        of_test = for_test(labels["train"])
        rows = {"train": np.setdiff1d(np.arange(len(train)), of_test), "test": of_test}
        splits, labels = {**splits, "test": train}, {**labels, "test": labels["train"]}
    if not all(map(len, rows.values())):
        raise UserError(
            f"{config.path} has no row {'to train on' if not len(rows['train']) else 'with a label to test'}"
        )
    encoded = {name: (_encoded(splits[name], image), f"{name} of {config.path}") for name in rows}
    pictures = [_InRow(*encoded[name], int(row)) for name, own in rows.items() for row in own]
    known_by = f"{image} {label} {[_files(split, config.path) for split in splits.values()]}"
    images = decode_once(pictures, known_by, config.path, config.image_size, config.fit, tell)
    owners = None
    if config.client_column:
        clients = ["" if client is None else str(client) for client in train[config.client_column]]
        owners = find_owners(clients, rows["train"], config.path, config.client_column)
    return {
        "x_train": images[: len(rows["train"])],
        "y_train": labels["train"][rows["train"]],
        "x_test": images[len(rows["train"]) :],
        "y_test": labels["test"][rows["test"]],
        "num_classes": len(names),
        "class_names": tuple(names),
        "owners": owners,
    }


class _InRow(NamedTuple):
    """The image in a row of a split."""

    split: Any  # with the column of the encoded images alone
    where: str  # the split's name and path, for messages
    row: int

    def __str__(self) -> str:
        return f"row {self.row} of {self.where}"

    def read(self) -> bytes:
        (image,) = self.split[self.row].values()
        if not (image or {}).get("bytes"):
            raise UserError(f"{self} has no image; save its bytes, or remove the row")
        return image["bytes"]


def _encoded(split: Any, column: str) -> Any:
    """A split with its column of images alone, as the bytes of their files."""
    from datasets import Image

    return split.select_columns([column]).cast_column(column, Image(decode=False))


def _open(path: str) -> dict[str, Any]:
    """The splits 'train' and, if there is one, 'test'."""
    wanted = "a folder of save_to_disk, or parquet files"
    found = existing_path(path, "data.path", "path", wanted)
    try:
        import datasets
    except ImportError:
        raise UserError(
            "data.source='datasets' needs Hugging Face's datasets: pip install 'fedjax_ssl[datasets]'"
        ) from None
    datasets.disable_progress_bars()
    mapped = {"keep_in_memory": False}  # overrides the environment: the cache of images identifies data by their files
    try:
        if any((found / name).exists() for name in ("dataset_dict.json", "state.json")):
            loaded = datasets.load_from_disk(str(found), **mapped)
        elif found.is_dir():
            if not any(found.rglob("*.parquet")):
                raise ValueError("it has none of these")
            loaded = datasets.load_dataset("parquet", data_dir=str(found), **mapped)
        else:
            loaded = datasets.load_dataset("parquet", data_files=str(found), **mapped)
    except Exception as error:  # The errors of datasets and pyarrow have no common base.
        raise UserError(f"data.path={path} cannot be read as {wanted} ({first_line(error)})") from error
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    if "train" not in splits:
        raise UserError(f"{path} has no split 'train', but {', '.join(map(str, splits))}")
    return {name: splits[name].with_format(None) for name in ("train", "test") if name in splits}


def _image_column(path: str, split: Any) -> str:
    """Name of the only image column: its type is `Image`, or it holds the bytes of image files."""
    from datasets import Image, Value

    def is_image(feature: Any) -> bool:
        of_bytes = isinstance(feature, dict) and set(feature) == {"bytes", "path"}
        return isinstance(feature, Image) or of_bytes or (isinstance(feature, Value) and "binary" in feature.dtype)

    found = [name for name, feature in split.features.items() if is_image(feature)]
    if len(found) != 1:
        what = f"the columns of images {', '.join(found)}" if found else "no column of images"
        raise UserError(f"{path} has {what}, but needs one; its columns are {', '.join(split.features)}")
    return found[0]


def _label_column(split: Any) -> str:
    """Name of the only `ClassLabel` column; '' if there is none or more than one."""
    from datasets import ClassLabel

    found = [name for name, feature in split.features.items() if isinstance(feature, ClassLabel)]
    return found[0] if len(found) == 1 else ""


def _labels(split: Any, column: str, path: str) -> list[str]:
    """The name of each row's label; '' if it has none."""
    check_column(split.features, column, "label_column", path)
    names = getattr(split.features[column], "names", None)
    values = list(split[column])
    if names:
        return ["" if value is None or value < 0 else names[value] for value in values]
    return ["" if value is None else str(value) for value in values]


def _files(split: Any, path: str) -> list[tuple[str, int, int, int]]:
    """The files of a split with their sizes and times; raises a UserError if there are none."""
    if not split.cache_files:
        raise UserError(f"{path}: datasets has it in memory and names no file that could tell whether it changed")
    found = [(file, os.stat(file)) for file in (pathlib.Path(entry["filename"]) for entry in split.cache_files)]
    return [(str(file.resolve()), state.st_size, state.st_mtime_ns, state.st_ctime_ns) for file, state in found]
