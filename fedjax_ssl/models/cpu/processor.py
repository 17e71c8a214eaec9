"""The processor, on which the fastest form of a layer depends."""

import functools
import pathlib

CPUINFO = pathlib.Path("/proc/cpuinfo")


@functools.cache
def has_wide_vectors() -> bool:
    """Whether the processor has vectors of 512 bits (AVX-512), according to Linux; False on other systems.

    XLA's library for convolutions has kernels for them; docs/performance.md has its speed.
    """
    return CPUINFO.exists() and "avx512f" in CPUINFO.read_text().split()
