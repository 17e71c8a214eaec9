"""The processor, on which the fastest form of a layer depends."""

import functools
import pathlib
import platform


def description() -> str:
    """The processor's name and instruction sets."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


@functools.cache
def has_wide_vectors() -> bool:
    """Whether the processor has vectors of 512 bits (AVX-512), according to Linux; False on other systems.

    XLA's library for convolutions has kernels for them; docs/performance.md has its speed.
    """
    return "avx512f" in description().split()
