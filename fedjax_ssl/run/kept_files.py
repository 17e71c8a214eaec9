"""Files of the user's cache, each with a checksum. What is damaged is made again."""

import contextlib
import hashlib
import pathlib

import jax
from jax._src import compilation_cache  # JAX has no public way to replace its own cache, which verifies nothing
from jax._src.compilation_cache_interface import CacheInterface

from fedjax_ssl.base.errors import first_line
from fedjax_ssl.base.files import read_whole, replaced
from fedjax_ssl.run.observe.log import warn

_SUM_BYTES = 32


class KeptFiles(CacheInterface):
    """A cache in a folder, also for JAX. An entry begins with the SHA-256 of its key and its content."""

    def __init__(self, folder: pathlib.Path, remedy: str = "the program is compiled again"):
        """Reads nothing yet; `remedy` says what happens if an entry is damaged."""
        self._path, self._remedy = folder, remedy

    def get(self, key: str) -> bytes | None:
        """The content of an entry; None if there is none, or it is damaged or another's."""
        file = self._path / key
        if not file.exists():
            return None
        try:
            found = read_whole(file)
            if found[:_SUM_BYTES] == _sum(key, found[_SUM_BYTES:]):
                with contextlib.suppress(OSError):
                    file.touch()  # the least recently used are removed
                return found[_SUM_BYTES:]
            why = "it is not what was written"
        except OSError as error:
            why = first_line(error)
        warn(f"{file}: {why}; {self._remedy}")
        return None

    def put(self, key: str, value: bytes) -> None:
        """Writes an entry, if there is room."""
        with contextlib.suppress(OSError), replaced(self._path / key) as file:
            file.write(_sum(key, value) + value)


def _sum(key: str, value: bytes) -> bytes:
    return hashlib.sha256(key.encode() + value).digest()


def keep_programs(folder: pathlib.Path) -> None:
    """Lets JAX keep compiled programs in a folder, and take them from there."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    others = compilation_cache.get_file_cache
    compilation_cache.get_file_cache = lambda path: (KeptFiles(folder), path) if path == str(folder) else others(path)
