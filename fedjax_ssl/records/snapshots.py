"""Snapshots: a model's outputs on a set of images after chosen rounds, saved in training for the report's pictures."""

import pathlib

import numpy as np

from fedjax_ssl.files import replace_arrays


def save_snapshot(folder: pathlib.Path, round_number: int, of: str, snapshot: dict[str, np.ndarray]) -> None:
    """Writes a snapshot as FOLDER/round_NNNNNN.npz.

    Args:
        folder: of the run's snapshots.
        round_number: after which it was taken.
        of: the set whose images it shows, 'test' or 'validation'; the file's entry `of`.
        snapshot: see `fedjax_ssl.engine.evaluation.make_snapshot`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    replace_arrays(folder / f"round_{round_number:06d}.npz", **snapshot, of=np.array(of))


def load_snapshots(folder: pathlib.Path) -> dict[int, dict[str, np.ndarray]]:
    """All snapshots of a folder, by round, the earliest first; those of earlier versions are of the test set."""
    found = {}
    for path in sorted(folder.glob("round_*.npz")):
        with np.load(path) as arrays:
            found[int(path.stem.removeprefix("round_"))] = {"of": np.array("test"), **arrays}
    return found
