"""Reads files, and writes them atomically, synced to the disk before the call returns."""

import contextlib
import errno
import itertools
import json
import os
import pathlib
import re
import secrets
import stat
from collections.abc import Iterator
from typing import IO, Any

from fedjax_ssl.base.errors import UserError

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
# The folder of config files: beside the package in a checkout, inside the package if it is installed.
CONFIGS = next((path for path in (PACKAGE / "configs", PACKAGE.parent / "configs") if path.is_dir()), PACKAGE)

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_unfinished: set[pathlib.Path] = set()  # temporary files of this process


def expanded(path: str | os.PathLike[str]) -> pathlib.Path:
    """Expands ~ or ~USER at the start of a path. Raises UserError if there is no such user."""
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{os.fspath(path)[:200]!r} begins with a home folder that is not known") from error


def replace_file(path: pathlib.Path, text: str, mode: int = 0o666) -> None:
    """Writes a text file. Characters that UTF-8 cannot encode, such as in a name in another encoding, are escaped."""
    with replaced(path, mode) as file:
        file.write(text.encode(errors="backslashreplace"))


def replace_arrays(path: pathlib.Path, **arrays: Any) -> None:
    """Writes an npz file of arrays."""
    import numpy as np  # here: callers that only replace text should not wait for it

    with replaced(path) as file:
        np.savez_compressed(file, **arrays)


@contextlib.contextmanager
def replaced(path: pathlib.Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Opens a temporary file that replaces `path`, even a link, at the end; after an error, `path` is unchanged.

    `mode` has the file's permissions, less the user's umask.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    _unfinished.add(temporary)
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
        _unfinished.discard(temporary)


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """A context that writes a file, whose folder it makes if it is missing. An OSError becomes a UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def read_whole(path: pathlib.Path) -> bytes:
    """A file's bytes. Raises OSError if it cannot be read, or is not a regular file: a pipe would block."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return path.read_bytes()


def read_json(path: pathlib.Path) -> Any:
    """The value in a JSON file. Raises OSError as `read_whole`, ValueError if it is not JSON."""
    try:
        return json.loads(read_whole(path))
    except RecursionError:
        raise ValueError("too many brackets inside each other") from None


def sync_folder(folder: pathlib.Path) -> None:
    """Waits until a folder's entries are on the disk; does nothing on systems without such a call (Windows)."""
    if os.name != "posix":
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: the file system has no such call
            raise
    finally:
        os.close(number)


def free_name(path: pathlib.Path) -> pathlib.Path:
    """The path, or the first of PATH_2, PATH_3, ... that does not exist."""
    names = itertools.chain([path], (path.with_name(f"{path.name}_{number}") for number in itertools.count(2)))
    return next(name for name in names if not os.path.lexists(name))


def discard_unfinished() -> None:
    """Removes the temporary files of unfinished writes, for a process that is about to end."""
    for temporary in list(_unfinished):
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def as_csv(columns: Any) -> str:
    """A table, as `pandas.DataFrame` takes it, as CSV; a spreadsheet takes no text in it for a formula.

    A text that begins like one gets an apostrophe before it, unless it is a number.
    """
    import pandas

    def plain(cell: Any) -> Any:
        is_formula = isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r"))
        return f"'{cell}" if is_formula and not _NUMBER.fullmatch(cell) else cell

    frame = pandas.DataFrame(columns).map(plain).rename(columns=plain)
    return frame.to_csv(index=False, float_format="%.10g", lineterminator="\n")


def cache_folder() -> pathlib.Path:
    """The library's folder in the user's cache."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "fedjax_ssl"


def private_cache(name: str, most_bytes: int) -> pathlib.Path | None:
    """A folder of this name in the user's cache, made if it is missing.

    Compiled programs are code, so the folder must be the user's own: None if other users can write there, it is a link,
    or it cannot be made. The least recently used files are removed until all have at most `most_bytes`.
    """
    folder = cache_folder() / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.lstat()
        ours = os.name != "posix" or (state.st_uid == os.getuid() and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
        if folder.is_symlink() or not ours:
            return None
        files = []
        for entry in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):  # another process has removed or renamed it
                files.append((entry.stat(follow_symlinks=False), pathlib.Path(entry.path)))
        total = 0
        for state, path in sorted(files, key=lambda file: max(file[0].st_atime, file[0].st_mtime), reverse=True):
            total += state.st_size
            if total > most_bytes:
                path.unlink(missing_ok=True)
    except OSError:
        return None
    return folder
