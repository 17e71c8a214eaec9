"""The arrays that every source returns, and checks for users' data."""

import pathlib
from typing import NamedTuple

import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.files import expanded

# All images form one array on the host and on the device. This is the most that a large GPU can hold besides a model.
MAX_BYTES = 8 * 10**9


class Arrays(NamedTuple):
    """Checked inputs and labels of a data set: images, or other inputs as in `npz.load_npz`."""

    x_train: np.ndarray  # uint8 [N, H, W, C], training images
    y_train: np.ndarray  # int32 [N], their labels, 0 .. num_classes - 1
    x_test: np.ndarray  # uint8 [T, H, W, C], test images
    y_test: np.ndarray  # int32 [T], their labels
    num_classes: int  # number of classes
    class_names: tuple[str, ...]  # their names, in the order of the labels
    owners: np.ndarray | None = None  # int32 [N], the client of each training example; None: not known
    row_sums: np.ndarray | None = None  # see `Dataset`; None: not computed yet


def existing_path(path: str, field: str, kind: str, wanted: str) -> pathlib.Path:
    """The path that a configuration field gives, with ~ resolved.

    Args:
        path: what the user wrote.
        field: the configuration field, for messages.
        kind: 'file' or 'folder', what it must be, or 'path' for either.
        wanted: what the path must hold, for messages.

    Raises:
        UserError: the field is empty, or there is no such file or folder.
    """
    if not path:
        raise UserError(f"{field} is empty; give {wanted}: --config.{field}={kind.upper()}")
    found, why = expanded(path), "does not exist"
    try:
        exists = found.exists()
    except OSError as error:  # the name is too long, or a folder may not be read
        exists, why = False, f"cannot be read: {error.strerror}"
    if not exists:
        raise UserError(f"{field}={path} {why}; give {wanted}")
    # Opening a pipe would wait for a writer.
    actual = "folder" if found.is_dir() else "file" if found.is_file() else "pipe, a socket or a device"
    kinds = ("file", "folder") if kind == "path" else (kind,)
    if actual not in kinds:
        raise UserError(f"{field}={path} is a {actual}, not a {' or a '.join(kinds)}; give {wanted}")
    return found
