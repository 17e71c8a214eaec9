"""Returns freed memory to the operating system."""

import ctypes
import functools
import gc
from collections.abc import Callable


def give_back_memory() -> None:
    """Collects garbage and makes the C library return freed memory.

    XLA's compiler frees most of the memory it took, up to a gigabyte, but glibc keeps it. A process would hold two to
    three times the memory that it needs, and a sweep would grow with every row. Without `malloc_trim` in the C library
    (macOS, Windows, musl) only the garbage is collected.
    """
    gc.collect()
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
