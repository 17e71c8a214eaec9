"""Freed memory goes back to the operating system, if the C library can give it back."""

import ctypes
import types

from fedjax_ssl.run import memory


def test_a_c_library_that_can_is_asked_and_others_are_done_without(monkeypatch):
    asked = []
    for library in (types.SimpleNamespace(malloc_trim=asked.append), types.SimpleNamespace()):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, library=library: library)
        memory.give_back_memory()
    assert asked == [0]
