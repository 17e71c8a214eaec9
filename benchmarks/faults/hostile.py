"""Files from elsewhere that carry code, fill the memory, crash a reader or keep it waiting.

Each try replaces a data set, a partition, an image, or a file of a run's folder by a hostile file; the run is then
reported, loaded and resumed. 'told': one line names what is wrong, and whatever was read all the same is unchanged.
'silent': the file's code was executed, or no line named the file, or something else was used. The files are read in a
separate process with at most 3 GB of memory above its start, and three minutes per file. The part first checks that the
code would run if a reader let it.
"""

import collections
import contextlib
import functools
import hashlib
import io
import json
import os
import pathlib
import pickle
import shutil
import signal
import struct
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np

import fedjax_ssl
from fedjax_ssl import UserError, train
from fedjax_ssl.data.npz import read_arrays
from fedjax_ssl.records.manifest import read_manifest, write_manifest
from fedjax_ssl.run.machine import use_compilation_cache

from .common import ROUNDS, Row, Trial, config_of, in_processes, limit_memory, row_of, same

MINUTES, COUNT = 20, 105
MEMORY, SECONDS = 3 << 30, 180
BOMB = 4 << 30  # bytes, less than a data set may have
MARK, RUN = "executed", "run"  # in the part's folder: a file that hostile code makes, and a good run
METHOD = "supervised"


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, mark: pathlib.Path):
        self.mark = str(mark)

    def __reduce__(self):
        return open, (self.mark, "w")


def run(trial: Trial) -> Iterator[Row]:
    """Yields the part's rows."""
    mark = trial.folder / MARK
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.exists()
    mark.unlink()
    train(config_of(METHOD, every=2), trial.folder / RUN)
    outcomes, notes = collections.defaultdict(collections.Counter), collections.defaultdict(list)
    cases = [(group, name, reader) for group, name, reader, _ in hostile_files(trial.folder)][: trial.count]
    for (group, name, reader), (outcome, why) in zip(cases, in_processes("hostile", cases, trial.folder)):
        outcomes[group][outcome] += 1
        print(f"{reader}, {name}: {outcome} {why}", flush=True)
        if outcome != "told":
            notes[group].append(f"{reader}, {name}: {why}")
        if not trial.goes_on():
            break
    for group, counts in outcomes.items():
        yield row_of(group, counts, "; ".join(notes[group]))


# --- The files. ------------------------------------------------------------------------------------------------------


def hostile_files(folder: pathlib.Path) -> list[tuple[str, str, str, Callable[[pathlib.Path], None]]]:
    """(kind of fault, description, reader, function that writes it to a path), always in the same order."""
    mark = folder / MARK
    objects = np.array([Payload(mark)] * 9, dtype=object)
    pickled = pickle.dumps(Payload(mark))
    script = f"open({str(mark)!r}, 'w')\n".encode()
    good = _arrays(folder)
    made = []

    def add(group: str, name: str, readers: str, write: Callable[[pathlib.Path], None]) -> None:
        made.extend((group, name, reader, write) for reader in readers.split())

    def content(what: bytes) -> Callable[[pathlib.Path], None]:
        return lambda path: path.write_bytes(what)

    def arrays(**changes) -> Callable[[pathlib.Path], None]:
        return lambda path: np.savez(path, **{**good, **changes})

    of_arrays = "npz predict partition_file node run/partition.npz run/class_counts.npz run/snapshots"
    of_run = "run/config.json run/dataset.json run/metrics.jsonl run/summary.json"
    code = "files that carry code"
    add(code, "a pickle", f"{of_arrays} {of_run} image rscfed", content(pickled))
    add(code, "pickled objects among the arrays", of_arrays, arrays(**dict.fromkeys(good, objects)))
    add(code, "a pickle in a zip of PyTorch", "rscfed npz", lambda path: _zip(path, [("archive/data.pkl", pickled)]))
    members = [(f"{key}.npy", pickled) for key in good]
    add(code, "a pickle in a zip, as an array", "npz", lambda path: _zip(path, members))
    add(code, "a script", "image npz run/config.json", content(script))
    postscript = f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n({mark}) (w) file closefile\nshowpage\n"
    add(code, "PostScript", "image", content(postscript.encode()))
    for field in ("method", "model.name"):
        name_code = functools.partial(_name_code, field=field, script=script)
        add(code, f"a script that {field} names", "run/config.json", name_code)
    add(code, "a pickle with checksums that fit", "run/checkpoint", content(pickled))

    bombs = "files made to fill the memory"
    zeros = folder / "zeros.npz"
    if not zeros.exists():
        _zeros(zeros, good)
    of_all = "npz predict run/partition.npz run/class_counts.npz run/snapshots"
    add(bombs, f"{BOMB >> 30} GB of zeros, packed", of_all, lambda path: shutil.copy(zeros, path))
    some = "npz run/partition.npz"
    add(bombs, "arrays of 3e18 bytes, by their headers", some, lambda path: _headers(path, good))
    add(bombs, "two arrays of one name", some, lambda path: _zip(path, _members(good) + _members(good)))
    packed = [("archive/data.pkl", pickle.dumps({0: [0] * 10**7}))]
    add(bombs, "a pickle of PyTorch, packed", "rscfed", lambda path: _zip(path, packed, zipfile.ZIP_DEFLATED))
    add(bombs, "2**30 rows from one list", "rscfed", content(b"\x80\x02]" + b"q\x00(h\x00h\x00e" * 30 + b"."))
    for name, image in _large_images().items():
        add(bombs, name, "image", content(image))

    crashes = "files made to crash a reader"
    for name, images in {"no images": np.zeros((0, 8, 8), np.uint8), "a number for images": np.uint8(0)}.items():
        labels = np.zeros(0, int)
        write = arrays(x_train=images, y_train=labels, images=images, labels=labels)
        add(crashes, name, "npz predict node", write)
    add(crashes, "whole arrays of something else", "run/class_counts.npz run/snapshots", arrays())
    for name, text in {
        "100,000 brackets": b"[" * 100_000,
        "a number of a million digits": b'{"round": ' + b"9" * 10**6 + b"}",
        "half a letter": b'{"round": "\\ud800"}',
        "nothing": b"",
    }.items():
        add(crashes, name, f"{of_run} run/manifest", content(text))

    waits = "what one would wait for"
    everywhere = f"{of_arrays} {of_run} run/checkpoint image rscfed"
    add(waits, "a pipe", everywhere, os.mkfifo)
    add(waits, "a link to /dev/zero", everywhere, lambda path: path.symlink_to("/dev/zero"))
    return made


def _arrays(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """A file that serves as data set, as a node's images, and as partition."""
    images, labels = np.zeros((9, 8, 8), np.uint8), np.arange(9) % 3
    data = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels, "images": images}
    return {**data, **read_arrays(str(folder / RUN / "partition.npz"), None)}


def _members(arrays: dict[str, np.ndarray]) -> list[tuple[str, bytes]]:
    members = []
    for name, array in arrays.items():
        file = io.BytesIO()
        np.save(file, array)
        members.append((f"{name}.npy", file.getvalue()))
    return members


def _zip(path: pathlib.Path, members: list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> None:
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", compression) as archive:
        warnings.simplefilter("ignore")  # about two members of one name
        for name, content in members:
            archive.writestr(name, content)


def _header(shape: str, dtype: str = "|u1") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def _headers(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    """Arrays with only a header."""
    _zip(path, [(f"{name}.npy", _header(f"({10**9}, {10**9}, 3)")) for name in arrays])


def _zeros(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    """More zeros as images than fit into memory; all else matches them."""
    arrays = {name: array for name, array in arrays.items() if name != "x_train"}
    fitting = {"y_train": np.arange(BOMB >> 20) % 3, "x_test": np.zeros((9, 1024, 1024), np.uint8)}
    _zip(path, _members({**arrays, **fitting}))
    with (
        zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("x_train.npy", "w", force_zip64=True) as member,
    ):
        member.write(_header(f"({BOMB >> 20}, 1024, 1024)"))
        for _ in range(BOMB >> 20):
            member.write(bytes(1 << 20))


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def _large_images() -> dict[str, bytes]:
    """Images of 10,000,000,000 pixels by their headers, and one with a text that unpacks to 200 MB."""
    side, signature = 100_000, b"\x89PNG\r\n\x1a\n"

    def png(width: int, *chunks: bytes) -> bytes:
        head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, width, 8, 0, 0, 0, 0))
        return signature + head + b"".join(chunks) + _chunk(b"IDAT", zlib.compress(bytes(72))) + _chunk(b"IEND", b"")

    entries = [(256, side), (257, side), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1), (278, side), (279, 8)]
    tags = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    canvas = (16383).to_bytes(3, "little")
    vp8x = b"VP8X" + struct.pack("<II", 10, 2) + canvas + canvas
    return {
        "a large PNG": png(side),
        "a PNG with a text of 200 MB": png(8, _chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(200_000_000)))),
        "a PNG with a profile of 200 MB": png(8, _chunk(b"iCCP", b"icc\0\0" + zlib.compress(bytes(200_000_000)))),
        "a large GIF": b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0x80, 0, 0) + bytes(6)
        + b"," + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0) + b"\x02\x02D\x01\x00;",
        "a large BMP": b"BM" + struct.pack("<IIIIiiHHIIiiII", 62, 0, 62, 40, side, side, 1, 1, *[0] * 6) + bytes(8),
        "a large PPM": b"P6 %d %d 255\n" % (side, side),
        "a large TIFF": b"II*\0" + struct.pack("<I", 16) + bytes(8) + struct.pack("<H", len(entries)) + tags + bytes(4),
        "a large WebP": b"RIFF" + struct.pack("<I", 4 + len(vp8x)) + b"WEBP" + vp8x,
    }  # fmt: skip


def _name_code(path: pathlib.Path, field: str, script: bytes) -> None:
    """A configuration that names a method or a backbone in a file beside it."""
    (path.parent / "evil.py").write_bytes(script)
    config = json.loads(path.read_text())
    section, _, name = field.rpartition(".")
    (config[section] if section else config)[name] = f"{path.parent}/evil.py:Evil"
    path.write_text(json.dumps(config))


# --- In a separate process. ------------------------------------------------------------------------------------------


def read_cases() -> None:
    """Reads the cases from stdin; writes each file, has it read, and prints a line."""
    folder = pathlib.Path(sys.argv[1])
    config = config_of(METHOD, every=2)
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8), np.uint8)
    uses = {
        "load": lambda run: fedjax_ssl.load(run)(images).probabilities,
        "resume": lambda run: train(config, run),
    }
    use_compilation_cache()
    trained = folder / f"first_{os.getpid()}"
    shutil.copytree(folder / RUN, trained)
    expected = {name: use(trained) for name, use in uses.items()}
    shutil.rmtree(trained)
    writers = {(name, reader): write for _, name, reader, write in hostile_files(folder)}
    limit_memory(MEMORY)
    for number, (_, name, reader) in enumerate(pickle.loads(sys.stdin.buffer.read())):
        case = folder / f"case_{os.getpid()}_{number}"
        case.mkdir()
        signal.alarm(SECONDS)
        try:
            found = _read(reader, case, folder, uses, writers[name, reader])
            outcome, why = _judge(found, expected)
        except Exception as error:
            outcome, why = "tracebacks", f"{type(error).__name__}: {error}"
        finally:
            signal.alarm(0)
        if (folder / MARK).exists():
            (folder / MARK).unlink()
            outcome, why = "silent", "its code was executed"
        print(outcome, why.replace("\n", " ")[:300].replace(str(case), "."), sep="\t", flush=True)
        shutil.rmtree(case, ignore_errors=True)


def _judge(found: dict[str, tuple], expected: dict) -> tuple[str, str]:
    """The outcome of a case, from the results or errors of its uses and their stderr."""
    said = []
    for use, (result, aside) in found.items():
        if "Traceback" in aside:
            return "tracebacks", f"{use}: {aside}"
        lines = [line for line in aside.splitlines() if "warning" in line]
        if isinstance(result, UserError | OSError):
            lines.append(str(result))
            if "\n" in lines[-1] or len(lines[-1]) > 1000:
                return "tracebacks", f"not one line: {lines[-1]}"
        elif use in expected and not lines and not same(result, expected[use]):
            return "silent", f"{use} gave something else"
        said += [*lines, *(result if use == "report" and isinstance(result, list) else [])]
    return ("told", said[0]) if said else ("silent", "nobody named it")


def _read(reader: str, case: pathlib.Path, folder: pathlib.Path, uses: dict, write: Callable) -> dict:
    """Writes the file to where a reader looks for it; returns the result or error of each use."""
    from fedjax_ssl.data.folder import load_folder, load_pictures
    from fedjax_ssl.data.npz import load_npz
    from fedjax_ssl.data.partition_file import load_partition
    from fedjax_ssl.data.rscfed_files import read_rscfed_partition
    from fedjax_ssl.flower.views import own_holdings
    from fedjax_ssl.predictor import predict_file

    if reader.startswith("run/"):
        run = case / "run"
        shutil.copytree(folder / RUN, run)
        _put(run, reader.partition("/")[2], write)
        all_uses = {"report": _report, **uses}
        if reader in ("run/class_counts.npz", "run/snapshots"):  # nothing else reads them
            all_uses = {"report": _report}
        return {use: _result(lambda function=function: function(run)) for use, function in all_uses.items()}
    if reader == "image":
        from PIL import Image

        for place in ("train/a", "train/b", "test/a"):
            (case / place).mkdir(parents=True)
            Image.new("L", (8, 8)).save(case / place / "good.png")
        write(case / "test" / "a" / "image.png")
        return {
            "load_folder": _result(lambda: load_folder(str(case), 8)),
            "load_pictures": _result(lambda: load_pictures(str(case / "test"), (8, 8, 1), "crop", "--images")),
        }
    path = case / "file.npz"
    write(path)
    facts = {"image_shape": [8, 8, 1], "num_classes": 10, "server_labels": 40}
    config = config_of(METHOD, every=2)
    readers = {
        "npz": lambda: load_npz(str(path)),
        "predict": lambda: predict_file(folder / RUN, case / "out.npz", npz=str(path), key="x_train"),
        "partition_file": lambda: load_partition(path, 1797, 8),
        "rscfed": lambda: read_rscfed_partition(path),
        "node": lambda: own_holdings(config, 0, str(path), facts),
    }
    return {reader: _result(readers[reader])}


def _result(function: Callable) -> tuple:
    """What a function returns, or an error that the command line gives as a line; and its stderr."""
    aside = io.StringIO()
    with contextlib.redirect_stderr(aside):
        try:
            return function(), aside.getvalue()
        except (UserError, OSError) as error:  # both are a line of the command line
            return error, aside.getvalue()


def _put(run: pathlib.Path, name: str, write: Callable) -> None:
    """Writes a hostile file over a run's file, and updates a checkpoint's checksums."""
    last = run / "checkpoints" / str(ROUNDS)
    files = {
        "snapshots": sorted((run / "snapshots").glob("*.npz"))[-1],
        "manifest": last.with_name(f"{ROUNDS}.json"),
        "checkpoint": max((path for path in last.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size),
    }
    path = files.get(name, run / name)
    if name != "config.json" and not name.endswith(".npz") and name != "snapshots":
        path.unlink()
    try:
        write(path)
    except FileExistsError:
        path.unlink()
        write(path)
    if name == "checkpoint" and path.is_file() and not path.is_symlink():
        manifest, digest = read_manifest(last), hashlib.sha256(path.read_bytes()).hexdigest()
        write_manifest(last, manifest._replace(files={**manifest.files, path.relative_to(last).as_posix(): digest}))


def _report(run: pathlib.Path) -> list[str]:
    """Writes the report; returns its messages about damage."""
    from fedjax_ssl.records.runs import read_run
    from fedjax_ssl.report import write_report

    # t-SNE takes seconds.
    with mock.patch("fedjax_ssl.report.run_report.to_plane", lambda embeddings: embeddings[:, :2]):
        write_report(run)
    found = read_run(run)
    return [*found.damages, *found.unreadable()]
