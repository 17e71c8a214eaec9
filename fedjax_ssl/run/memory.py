"""Returns freed memory to the operating system."""

import contextlib
import ctypes
import gc


def give_back_memory() -> None:
    """Collects garbage and makes the C library return freed memory.

    XLA's compiler frees most of the memory it took, up to a gigabyte, but glibc keeps it. A process would hold two to
    three times the memory that it needs, and a sweep would grow with every row. Without `malloc_trim` in the C library
    (macOS, Windows, musl) only the garbage is collected.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
