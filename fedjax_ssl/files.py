"""Files that are written whole or not at all."""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import IO

import numpy as np


def replace_file(path: pathlib.Path, text: str) -> None:
    """Writes a text file."""
    with replaced(path) as file:
        file.write(text.encode())


def replace_arrays(path: pathlib.Path, **arrays: np.ndarray) -> None:
    """Writes an npz file."""
    with replaced(path) as file:
        np.savez_compressed(file, **arrays)


@contextlib.contextmanager
def replaced(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file that replaces `path` at the end; after an error, `path` is unchanged."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
