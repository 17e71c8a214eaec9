"""Where users' data are, and how large they may be."""

import pathlib

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.files import expanded

# All images form one array on the host and on the device. This is the most that a large GPU can hold besides a model.
MAX_BYTES = 8 * 10**9


def existing_path(path: str, field: str, kind: str, wanted: str) -> pathlib.Path:
    """The path that a configuration field gives, with ~ resolved; raises a UserError if there is none.

    It must be of the kind 'file' or 'folder', or 'path' for either. Messages say what is wanted there.
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
