"""Loads a user's data set from four memory-mapped npy files in a folder, which take no memory and are not copied."""

import pathlib

import numpy as np

from fedjax_ssl.data.arrays import MAX_BYTES, Arrays, existing_path
from fedjax_ssl.data.npz import KEYS, Member, checked_arrays, read_header
from fedjax_ssl.errors import UserError, first_line


def load_npy(path: str) -> Arrays:
    """Loads a data set from FOLDER/x_train.npy, y_train.npy, x_test.npy and y_test.npy, as `np.save` writes them.

    Args:
        path: the folder. The arrays are as in `load_npz`.

    Returns:
        The arrays; images are memory-mapped.

    Raises:
        UserError: the folder or a file is missing, a file contradicts its header, or an array is invalid.
    """
    folder = existing_path(path, "data.path", "folder", f"a folder with {', '.join(f'{key}.npy' for key in KEYS)}")
    files = {
        key: existing_path(str(folder / f"{key}.npy"), "data.path", "file", "it as np.save writes it") for key in KEYS
    }
    members = {key: _header(key, file) for key, file in files.items()}
    for key in (KEYS[1], KEYS[3]):
        if members[key].bytes > MAX_BYTES:
            raise UserError(f"{files[key]} takes {members[key].bytes / 1e9:.1f} GB; labels are [N], one for each image")

    def mapped(member: Member) -> np.ndarray:
        return np.memmap(files[member.key], member.dtype, "r", member.start, member.shape)

    return checked_arrays(path, KEYS, members, lambda member: np.array(mapped(member)), mapped)


def _header(key: str, file: pathlib.Path) -> Member:
    try:
        with file.open("rb") as opened:
            member, by_columns = read_header(key, opened, file.stat().st_size)
        if by_columns and len(member.shape) > 1:
            raise ValueError("it is stored by columns; make it np.ascontiguousarray")
        if not member.bytes:
            raise ValueError("it is empty")
    except Exception as error:  # The errors of NumPy's parser have no common base.
        raise UserError(
            f"{file} cannot be read ({first_line(error)}); write it anew with np.save, numbers only"
        ) from error
    return member
