"""Freed memory goes back to the operating system."""

import ctypes
import pathlib

import pytest

from fedjax_ssl.run import memory

STATM = pathlib.Path("/proc/self/statm")


def resident_mb():
    return int(STATM.read_text().split()[1]) * 4096 / 2**20


def test_what_was_freed_is_given_back():
    if not STATM.exists() or not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("this system has no /proc, or its C library no malloc_trim")
    c = ctypes.CDLL(None)
    c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    c.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    memory.give_back_memory()
    before, size = resident_mb(), 64 * 1024
    blocks = [c.malloc(size) for _ in range(3200)]  # 200 MB in blocks too small for their own mapping
    for block in blocks:
        c.memset(block, 1, size)
    for block in blocks[:-1]:
        c.free(block)
    held = resident_mb()  # the last block keeps the heap from shrinking
    memory.give_back_memory()
    assert held - before > 150 > 50 > resident_mb() - before
    c.free(blocks[-1])


def test_other_systems_do_without(monkeypatch):
    asked = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: asked.append(name))
    memory.give_back_memory()
    assert asked == [None]
