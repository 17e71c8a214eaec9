"""Snapshots: a model's outputs on the test images after chosen rounds, saved in training for the report's pictures."""

import pathlib

import numpy as np

from fedjax_ssl.files import replace_arrays


def save_snapshot(folder: pathlib.Path, round_number: int, snapshot: dict[str, np.ndarray]) -> None:
    """Writes a snapshot as FOLDER/round_NNNNNN.npz."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_arrays(folder / f"round_{round_number:06d}.npz", **snapshot)


def load_snapshots(folder: pathlib.Path) -> dict[int, dict[str, np.ndarray]]:
    """All snapshots of a folder, by round, the earliest first."""
    found = {}
    for path in sorted(folder.glob("round_*.npz")):
        with np.load(path) as arrays:
            found[int(path.stem.removeprefix("round_"))] = dict(arrays)
    return found
