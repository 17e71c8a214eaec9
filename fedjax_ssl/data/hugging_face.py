"""Loads images from a data set of Hugging Face's `datasets` on disk: a folder of `save_to_disk`, or parquet files.

    FOLDER of ds.save_to_disk, FILE.parquet, or a FOLDER of parquet files, see `_parquet_files`

A column of images has their bytes, or paths of their files. Rows stay in their order. Arrow memory-maps the columns,
and images are decoded only once, see `decode_once`. Nothing is downloaded.
"""

import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.base.errors import UserError, first_line, printable, say
from fedjax_ssl.base.files import expanded
from fedjax_ssl.data.arrays import existing_path
from fedjax_ssl.data.decoded import Picture, decode_once
from fedjax_ssl.data.folder import SUFFIXES, known_files
from fedjax_ssl.data.labels import Labels, divide, has_no_label, read_labels
from fedjax_ssl.data.owners import read_names, read_owners
from fedjax_ssl.data.tables import PARQUET, check_columns

# Words in the names of parquet files -> the split.
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "evaluation"), "validation"),
}


def load_datasets(config: Any, tell: Callable[[str], Any]) -> dict[str, Any]:
    """Loads the data set in `config.path`, by the fields of the `data` section: as `load_folder`.

    Without a split 'test' see `labels.divide`. Splits with other names are left out, with a line, and so is a test row
    without a label. Classes are in the order of the label's `ClassLabel`, otherwise sorted.

    Raises a UserError if `datasets` is not installed, the path holds no such data set, a column is invalid, or a test
    row has a label that training lacks.
    """
    path, splits = config.path, _open(config.path)
    train, test = splits["train"], splits.get("test", splits["train"])
    of_classes = [name for name, feature in train.features.items() if hasattr(feature, "names")]  # `ClassLabel`
    image, label = _image_column(path, train), config.label_column or (of_classes[0] if len(of_classes) == 1 else "")
    named = [(field, config[field]) for field in ("client_column", "domain_column") if config[field]]
    check_columns(train.features, path, ("label_column", label), *named)
    labels, names = _labels(train, label, path, getattr(train.features[label], "names", None))
    if "test" in splits:
        test_labels = _labels(test, label, path, names).codes
        rows, test_rows = np.arange(len(labels)), np.flatnonzero(test_labels >= 0)
    else:
        test_labels, (rows, test_rows) = labels, divide(labels, names, path)
    train_pictures, train_files = _pictures(train, image, rows, "train", path)
    test_pictures, test_files = _pictures(test, image, test_rows, "test", path)
    pictures = [*train_pictures, *test_pictures]
    apart = [picture for picture in pictures if isinstance(picture, pathlib.Path)]
    known_by = f"{image} {label} {_files(train, path)} {_files(test, path)} {known_files(apart, expanded(path))}"
    images, bits, row_sums = decode_once(pictures, known_by, path, config.image_size, config.fit, tell)
    owners, domains = None, ()
    if name := config.domain_column:
        check_columns(test.features, path, ("domain_column", name))
        domains = tuple(
            read_names(list(split[name]), of_split, f"{path} (data.domain_column={name!r})", "domain")
            for split, of_split in ((train, rows), (test, test_rows))
        )
    if config.client_column:
        where = f"{path} (data.client_column={config.client_column!r})"
        owners = read_owners(list(train[config.client_column]), rows, where)
    return {
        "x_train": images[: len(rows)],
        "y_train": labels[rows],
        "x_test": images[len(rows) :],
        "y_test": test_labels[test_rows],
        "num_classes": len(names),
        "class_names": names,
        "owners": owners,
        "domains": domains,
        "files": (train_files, test_files),
        "details": {"bits": bits} if bits else {},
        "row_sums": row_sums,
    }


class _InRow(NamedTuple):
    """The image in a row of a split."""

    split: Any  # with the column of the encoded images alone
    where: str  # the split's name and path, for messages
    row: int  # from 0

    def __str__(self) -> str:
        return f"row {self.row + 1} of {self.where}"

    def read(self) -> bytes:
        (image,) = self.split[self.row].values()
        if not (image or {}).get("bytes"):
            raise UserError(f"{self} has no image; save its bytes, or remove the row")
        return image["bytes"]


def _pictures(split: Any, column: str, rows: np.ndarray, name: str, path: str) -> tuple[list[Picture], tuple[str, ...]]:
    """The images in some rows, and their names; raises a UserError if a row names a file that does not exist here.

    They are in the column itself, or in the files that it names, as `Dataset.to_parquet` leaves them.
    """
    from datasets import Image

    encoded = split.select_columns([column]).cast_column(column, Image(decode=False))
    has_bytes, paths = [], []  # read from Arrow's arrays, which do not read the bytes for it
    for chunk in encoded.data.column(column).chunks:
        has_bytes += chunk.field("bytes").is_valid().to_pylist()
        paths += chunk.field("path").to_pylist()
    found: list[Picture] = []
    folder = expanded(path) if expanded(path).is_dir() else expanded(path).parent
    for row in map(int, rows):
        in_row = _InRow(encoded, f"{name} of {path}", row)
        if has_bytes[row] or not paths[row]:
            found.append(in_row)
            continue
        file = folder / paths[row]  # an absolute path stays as it is
        if not file.is_file():
            raise UserError(f"{in_row} names the image {file}, which is no file here; put it there, or save its bytes")
        found.append(file)
    return found, tuple(printable(paths[row] or f"row {row + 1}") for row in rows)


def _open(path: str) -> dict[str, Any]:
    """The splits 'train' and, if there is one, 'test'."""
    wanted = "a folder of save_to_disk, or parquet files"
    found = existing_path(path, "data.path", "path", wanted)
    try:
        import datasets
    except ImportError:
        line = "data.source='datasets' needs Hugging Face's datasets: pip install 'fedjax_ssl[datasets]'"
        raise UserError(line) from None
    datasets.disable_progress_bars()
    for file in found.rglob("*"):
        if not (file.is_file() or file.is_dir()):  # to open a pipe would wait for a writer
            raise UserError(f"{file} is not a file; remove it, or put a copy there")
    mapped = {"keep_in_memory": False}  # overrides the environment: the cache of images identifies data by their files
    try:
        if any((found / name).exists() for name in ("dataset_dict.json", "state.json")):
            loaded = datasets.load_from_disk(str(found), **mapped)
        else:
            loaded = datasets.load_dataset("parquet", data_files=_parquet_files(found), **mapped)
    except Exception as error:  # The errors of datasets and pyarrow have no common base.
        raise UserError(f"data.path={path} cannot be read as {wanted} ({first_line(error)})") from error
    named = loaded if isinstance(loaded, dict) else {"train": loaded}
    splits = {str(name).lower(): split for name, split in named.items()}
    if "train" not in splits:
        raise UserError(f"{path} has no split 'train', but {', '.join(splits)}")
    if others := splits.keys() - {"train", "test"}:
        say(f"{path}: {', '.join(sorted(others))} is neither for training nor for testing, and is left out")
    return {name: splits[name].with_format(None) for name in ("train", "test") if name in splits}


def _parquet_files(path: pathlib.Path) -> dict[str, list[str]]:
    """Split -> its parquet files, by words in their names and in those of their folders.

    Without such words all files are 'train'. Not by `datasets`, which takes files of the word eval for testing, too.
    Raises a ValueError if there are no files, or one has both words.
    """
    if path.is_file():
        return {"train": [str(path)]}
    splits: dict[str, list[str]] = {}
    for file in sorted(file for file in path.rglob("*") if file.suffix.lower() == PARQUET):
        words = re.split(r"[^a-z]+", file.relative_to(path).as_posix().lower())
        found = {_SPLITS[word] for word in words if word in _SPLITS} or {""}
        if len(found) > 1:
            raise ValueError(f"{file} has the words of {' and '.join(sorted(found))}")
        splits.setdefault(found.pop(), []).append(str(file))
    if not splits:
        raise ValueError("it has none of these")
    if not splits.keys() & {"train", "test"}:
        splits["train"] = splits.pop("", [])
    for name, files in splits.items():
        if name not in ("train", "test"):
            line = f"{path}: {len(files)} parquet files are neither for training nor for testing, such as {files[0]}"
            say(f"{line}, and are left out")
    return {name: splits[name] for name in ("train", "test") if splits.get(name)}


def _image_column(path: str, split: Any) -> str:
    """Name of the only column of images: of type `Image`, of bytes, or else of texts, the first of an image file."""
    from datasets import Image, Value

    def is_image(feature: Any) -> bool:
        of_bytes = isinstance(feature, dict) and set(feature) == {"bytes", "path"}
        return isinstance(feature, Image) or of_bytes or (isinstance(feature, Value) and "binary" in feature.dtype)

    found = [name for name, feature in split.features.items() if is_image(feature)]
    if not found and len(split):
        found = [name for name, value in split[0].items() if str(value).lower().endswith(SUFFIXES)]
    if len(found) != 1:
        what = f"the columns of images {', '.join(found)}" if found else "no column of images"
        raise UserError(f"{path} has {what}, but needs one; its columns are {', '.join(split.features)}")
    return found[0]


def _labels(split: Any, column: str, path: str, names: Sequence[str] | None) -> Labels:
    """The labels of a split; `names` of the classes, None if the split has values instead."""
    check_columns(split.features, path, ("label_column", column))
    where, values = f"{path} (data.label_column={column!r})", list(split[column])
    own = getattr(split.features[column], "names", None)
    if own:
        outside = [row for row, value in enumerate(values) if value is not None and not -1 <= value < len(own)]
        if outside:
            line = f"{values[outside[0]]} in row {outside[0] + 1} is no position of its {len(own)} class names, nor -1"
            raise UserError(f"{where}: {line}")
        values = [-1 if value is None or value < 0 else own[value] for value in values]
    return read_labels(values, where, names and [name for name in names if not has_no_label(name)])


def _files(split: Any, path: str) -> str:
    """What identifies the files of a split, see `known_files`; raises a UserError if there are none."""
    if not split.cache_files:
        raise UserError(f"{path}: datasets has it in memory and names no file that could tell whether it changed")
    return known_files([pathlib.Path(entry["filename"]) for entry in split.cache_files], expanded(path))
