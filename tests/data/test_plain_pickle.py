"""Published partition files are read by no unpickler: hostile ones run nothing, crash nothing and end in a line."""

import pickle
import pickletools
import struct
import subprocess
import sys
import textwrap
import zipfile

import numpy as np
import pytest

from fedjax_ssl.data.plain_pickle import Array, read_plain

ROWS = {0: [3, 1, 70000], 1: np.array([5, 2], np.int32), 2: list(np.array([9, 8], ">u2")), 3: np.zeros(0, int)}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_are_what_pickle_reads(protocol):
    held = ({"data_partition": ROWS, "who": "me", 7: None}, (True, -1, 2**40, []))
    (found, rest) = read_plain(pickle.dumps(held, protocol))
    assert rest == held[1] and found["who"] == "me" and found[7] is None and set(found) == set(held[0])
    for client, rows in ROWS.items():
        read = found["data_partition"][client]
        np.testing.assert_array_equal(read.values if isinstance(read, Array) else read, rows)


class Calls:
    """Its pickle calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def named(module, name, arguments=b")"):
    """A pickle that calls any name, importable here or not."""
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + arguments + b"R."


def hostile_files(mark):
    """Name -> content. What is executed makes the file `mark`."""
    touch = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    kind = pickle.dumps(np.dtype("O"), 2)[2:-1]
    address = b"C\x08" + struct.pack("<Q", 0x4141414141414141)
    files = {
        "exec": pickle.dumps({"data_partition": Calls(exec, touch)}),
        "eval by protocol 4": pickle.dumps({"data_partition": Calls(eval, touch)}, 4),
        "a submodule of numpy": named("numpy.f2py.__main__", "main"),
        "numpy's loader": named("numpy", "load", b"X\x03\x00\x00\x00x.x\x85"),
        "numpy.dtype of another module": named("numpy.lib.npyio", "dtype", b"X\x02\x00\x00\x00i8\x85"),
        "a dotted name": b"\x80\x04\x8c\x05numpy\x8c\x0fdtype.__class__\x93)R.",
        "bytes as objects, by scalar": named("numpy.core.multiarray", "scalar", kind + address + b"\x86"),
        "bytes as objects, by buffer": named(
            "numpy.core.numeric", "_frombuffer", b"(" + address + kind + b"K\x01\x85X\x01\x00\x00\x00Ct"
        ),
        "bytes as objects, by state": pickle.dumps(np.array([{}], object), 2),
        "a class for an array": named("numpy", "ndarray", b"K\x01\x85" + kind + address + b"\x87"),
        "a name called twice": b"\x80\x02cnumpy\ndtype\n)R)R.",
        "building a name": b"\x80\x02cnumpy\ndtype\n(K\x01K\x02tb.",
        "a key of many tuples": b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.",
        "many lists": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
        "a memo of 2**32 entries": b"\x80\x02}r\xff\xff\xff\xff.",
        "an array of 2**40 bytes": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".",
        "2**30 rows from one list": b"\x80\x02]" + b"q\x00(h\x00h\x00e" * 30 + b".",
        "one list for a thousand clients": b"\x80\x02](" + b"K\x01" * 50_000 + b"eq\x00}("
        + b"".join(b"J" + struct.pack("<i", client) + b"h\x00" for client in range(1000)) + b"u.",
        "a row below 0": pickle.dumps({0: [-1]}), "a row beyond an int32": pickle.dumps({0: [2**32 + 1]}),
        "a place beyond the tail": pickle.dumps(({0: [9]}, [1, 2])),
        "texts and numbers as clients": pickle.dumps({"data_partition": {0: [1], "a": [2]}}),
        "rows of lists": pickle.dumps({0: [[1], [2, 3]]}), "a number without an end": b"\x80\x02\x8b" + b"\xff" * 9,
        "nothing": b"", "an end alone": b".",
    }  # fmt: skip
    whole = pickle.dumps({"data_partition": {0: [3, 1], 1: np.arange(5)}}, 2)
    rng = np.random.default_rng(0)
    for number in range(100):
        changed = bytearray(whole)
        for place in rng.integers(0, len(whole), 3):
            changed[place] ^= 1 << int(rng.integers(8))
        files[f"changed {number}"] = bytes(changed)
    return files


READER = textwrap.dedent("""
    import faulthandler, pathlib, resource, sys
    from fedjax_ssl.data.rscfed_files import read_rscfed_lists, read_rscfed_partition
    from fedjax_ssl.errors import UserError
    faulthandler.enable()
    if sys.platform == "linux":
        used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 3 * 10**9,) * 2)
    for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
        for read in (read_rscfed_partition, read_rscfed_lists):
            try:
                read(path)
                print("read", path.name)
            except UserError as error:
                assert len(str(error).splitlines()) == 1, error
                print("refused", path.name, error)
""")


def test_hostile_files_run_nothing_and_crash_nothing(tmp_path):
    mark, folder = tmp_path / "executed", tmp_path / "files"
    folder.mkdir()
    files = hostile_files(mark)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with zipfile.ZipFile(folder / "a bomb", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({0: [0] * 5_000_000}, 2))
    done = subprocess.run([sys.executable, "-c", READER, folder], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not mark.exists()
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * (len(files) + 1)
    accepted = {line.removeprefix("read ") for line in lines if line.startswith("read ")}
    assert all(name.startswith("changed") for name in accepted)  # a changed row is still a row


def test_the_hostile_files_are_hostile(tmp_path):
    """Python's own reader runs them: else the test above would show nothing."""
    mark = tmp_path / "executed"
    pickle.loads(hostile_files(mark)["exec"])
    assert mark.exists()
    assert any(opcode.name == "REDUCE" for opcode, _, _ in pickletools.genops(hostile_files(mark)["numpy's loader"]))
