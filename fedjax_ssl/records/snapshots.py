"""Snapshots: a model's outputs on a set of images after chosen rounds, saved for the pictures of the report."""

import pathlib

import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.files import make_folder, replace_arrays
from fedjax_ssl.data.npz import read_arrays


def save_snapshot(folder: pathlib.Path, round_number: int, of: str, snapshot: dict[str, np.ndarray]) -> None:
    """Writes a snapshot as FOLDER/round_NNNNNN.npz.

    Args:
        folder: of the run's snapshots.
        round_number: it was taken after this round.
        of: the set whose images it shows, 'test' or 'validation'; the file's entry `of`.
        snapshot: see `fedjax_ssl.engine.evaluation.make_snapshot`.
    """
    make_folder(folder)
    replace_arrays(folder / f"round_{round_number:06d}.npz", **snapshot, of=np.array(of))


BEST = "best.npz"


def save_best(folder: pathlib.Path, round_number: int, snapshot: dict[str, np.ndarray]) -> None:
    """Writes the predictions of the best model so far on the test set, replacing earlier ones.

    Args:
        folder: of the run's snapshots.
        round_number: the round.
        snapshot: with `predictions` and `labels`; the rest is not written.
    """
    make_folder(folder)
    outputs = {name: snapshot[name] for name in ("predictions", "labels")}
    replace_arrays(folder / BEST, **outputs, round=np.array(round_number))


def snapshot_files(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """Round -> the file of its snapshot, the earliest first."""
    names = {path.stem.removeprefix("round_"): path for path in sorted(folder.glob("round_*.npz"))}
    return {int(number): path for number, path in names.items() if number.isdecimal()}


def load_snapshot(path: pathlib.Path, classes: int | None = None) -> dict[str, np.ndarray]:
    """Reads a snapshot.

    Args:
        path: of `save_snapshot` or `save_best`.
        classes: C of the data set; None: unknown.

    Raises:
        UserError: it cannot be read, or is not a snapshot with this number of classes.
    """
    found = {"of": np.array("test"), **read_arrays(str(path), None)}
    if not _is_snapshot(found, classes, with_embeddings=path.name != BEST):
        raise UserError(f"{path} is no snapshot of this run")
    return found


def _is_snapshot(found: dict[str, np.ndarray], classes: int | None, with_embeddings: bool) -> bool:
    """Whether these are labels and predictions [T], from 0 to C - 1, and finite embeddings [n, D]."""
    labels = [found.get(name) for name in ("labels", "predictions", "embedding_labels")[: 2 + with_embeddings]]
    if any(each is None or each.ndim != 1 or each.dtype.kind not in "iu" or not len(each) for each in labels):
        return False
    if any(each.min() < 0 or (classes is not None and each.max() >= classes) for each in labels):
        return False
    if with_embeddings:
        embeddings = found.get("embeddings", np.zeros(0))
        if embeddings.ndim != 2 or embeddings.dtype.kind != "f" or not np.isfinite(embeddings).all():
            return False
        if len(embeddings) != len(labels[2]):
            return False
    numbers = [found[name].ndim for name in ("of", "loss", "auc", "round") if name in found]
    return len(labels[0]) == len(labels[1]) and not any(numbers)
