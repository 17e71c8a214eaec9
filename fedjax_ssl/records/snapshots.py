"""Snapshots: a model's outputs on a set of images after chosen rounds, saved for the pictures of the report."""

import pathlib

import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.files import replace_arrays
from fedjax_ssl.records.fitting import read_fitting

_ARRAYS = {
    "of": "U", "labels": "iu T", "predictions": "iu T", "embedding_labels": "iu N", "embeddings": "f ND",
}  # fmt: skip
_OPTIONAL = {"loss": "f", "auc": "f", "confidences": "f T", "ranks": "iu T", "domains": "U T"}


def save_snapshot(folder: pathlib.Path, round_number: int, of: str, snapshot: dict[str, np.ndarray]) -> None:
    """Writes what `make_snapshot` returns as FOLDER/round_NNNNNN.npz; `of` is the set, 'test' or 'validation'.

    With the data's domains it also has `domains`, str [T], of the test set.
    """
    folder.mkdir(exist_ok=True)
    replace_arrays(folder / f"round_{round_number:06d}.npz", **snapshot, of=np.array(of))


def snapshot_files(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """Round -> the file of its snapshot, the earliest first."""
    names = {path.stem.removeprefix("round_"): path for path in sorted(folder.glob("round_*.npz"))}
    return {int(number): path for number, path in names.items() if number.isdecimal()}


def load_snapshot(path: pathlib.Path, classes: int | None = None) -> dict[str, np.ndarray]:
    """Reads a snapshot of a data set with this number of classes, C; None: unknown.

    Raises a UserError if it cannot be read, or its labels are not 0 to C - 1, or its embeddings not finite.
    """
    found = read_fitting(path, _ARRAYS, _OPTIONAL)
    labels = [found[name] for name in ("labels", "predictions", "embedding_labels")]
    are_classes = all(len(each) and each.min() >= 0 and each.max() < (classes or np.inf) for each in labels)
    if not are_classes or not np.isfinite(found["embeddings"]).all():
        raise UserError(f"{path} has labels of other classes, or embeddings that are not finite")
    return found
