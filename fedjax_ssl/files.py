"""Files that are written whole or not at all."""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import IO, Any

_unfinished: set[pathlib.Path] = set()  # temporary files of this process


def replace_file(path: pathlib.Path, text: str) -> None:
    """Writes a text file."""
    with replaced(path) as file:
        file.write(text.encode())


def replace_arrays(path: pathlib.Path, **arrays: Any) -> None:
    """Writes an npz file of arrays."""
    import numpy as np  # here, for whoever only replaces text should not wait for it

    with replaced(path) as file:
        np.savez_compressed(file, **arrays)


@contextlib.contextmanager
def replaced(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file that replaces `path` at the end; after an error, `path` is unchanged."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    _unfinished.add(temporary)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        _unfinished.discard(temporary)


def discard_unfinished() -> None:
    """Removes the temporary files that are being written, for a process that ends in the middle."""
    for temporary in list(_unfinished):
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
