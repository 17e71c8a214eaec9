"""Returns freed memory to the operating system."""

import ctypes
import functools
import gc
from collections.abc import Callable


def give_back_memory() -> None:
    """Collects garbage and makes the C library return freed memory.

    The compiler frees most of what it took, up to a gigabyte, and glibc keeps it for later: a process would hold
    two to three times the memory that it needs, and a sweep's more with every row. Where the C library has no
    `malloc_trim` (macOS, Windows, musl) only the first is done.
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
