"""Randomly changed images and npz files, read as a data set and for predictions.

Each try changes one file of a good folder: a bit, a run of bytes, a number of the header, its end cut off, a piece
doubled, a piece of another file. 'right': it was read with its old pixels or, in formats without a checksum, with the
pixels that it has now. 'silent': a file with a checksum gave other pixels without a message. Each batch is read in a
separate process with at most 3 GB of memory above its start, and 10 seconds per file. A process that dies or hangs
counts as a traceback, and so does a Python warning. Lines that a C decoder such as libtiff writes to stderr in addition
count as told.
"""

import collections
import io
import os
import pathlib
import pickle
import random
import signal
import sys
from collections.abc import Iterator

import numpy as np

from .common import Row, Trial, in_processes, limit_memory, row_of

MINUTES, COUNT = 8, 500
BATCH = 50
MEMORY, SECONDS = 3 << 30, 10
WITH_CHECKSUM = ("PNG", "NPZ")


def run(trial: Trial) -> Iterator[Row]:
    """Yields the part's rows."""
    files = _good_files(np.random.default_rng(0))
    outcomes, notes = collections.defaultdict(collections.Counter), collections.defaultdict(collections.Counter)
    for first in range(0, trial.count, BATCH):
        if not trial.goes_on():
            break
        cases = []
        for number in range(first, min(first + BATCH, trial.count)):
            name = sorted(files)[number % len(files)]
            cases.append((name, files[name], _mutate(files[name], files, trial.rng)))
        for (name, *_), (outcome, why) in zip(cases, in_processes("images", cases, trial.folder)):
            kind = name.partition("_")[0]
            outcomes[kind][outcome] += 1
            if outcome in ("silent", "tracebacks", "lost"):
                notes[kind][why] += 1
    for kind, counts in sorted(outcomes.items()):
        yield row_of(f"a changed {kind}", counts, "; ".join(f"{count} {why}" for why, count in notes[kind].items()))


def _good_files(rng: np.random.Generator) -> dict[str, bytes]:
    """FORMAT_kind -> a file with an image of 12 x 10 pixels; NPZ_* hold data sets."""
    from PIL import Image

    colours = rng.integers(0, 256, (10, 12, 3)).astype(np.uint8)
    image = Image.fromarray(colours)
    wide = Image.fromarray(rng.integers(0, 65536, (10, 12)).astype(np.uint16))
    made = {
        "PNG_rgb": (image, {}),
        "PNG_grey": (image.convert("L"), {}),
        "PNG_palette": (image.convert("P"), {"transparency": 3}),
        "PNG_alpha": (image.convert("RGBA"), {}),
        "PNG_16": (wide, {}),
        "JPEG_rgb": (image, {"exif": _upright()}),
        "JPEG_progressive": (image, {"progressive": True}),
        "JPEG_cmyk": (image.convert("CMYK"), {}),
        "GIF_one": (image.convert("P"), {}),
        "GIF_many": (image.convert("P"), {"save_all": True, "append_images": [image.rotate(90).convert("P")]}),
        "BMP_rgb": (image, {}),
        "BMP_palette": (image.convert("P"), {}),
        "PPM_rgb": (image, {}),
        "TIFF_raw": (image, {}),
        "TIFF_lzw": (image, {"compression": "tiff_lzw"}),
        "TIFF_deflate": (image, {"compression": "tiff_adobe_deflate"}),
        "TIFF_jpeg": (image, {"compression": "jpeg"}),
        "WEBP_lossy": (image, {}),
        "WEBP_lossless": (image, {"lossless": True}),
    }
    files = {}
    for name, (picture, options) in made.items():
        content = io.BytesIO()
        picture.save(content, name.partition("_")[0], **options)
        files[name] = content.getvalue()
    for name, save in {"NPZ_stored": np.savez, "NPZ_deflate": np.savez_compressed}.items():
        content = io.BytesIO()
        images, labels = rng.integers(0, 256, (12, 6, 5, 3)).astype(np.uint8), np.arange(12) % 3
        save(content, x_train=images, y_train=labels, x_test=images[:6], y_test=labels[:6])
        files[name] = content.getvalue()
    return files


def _upright():
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    return exif


def _mutate(content: bytes, files: dict[str, bytes], rng: random.Random) -> bytes:
    """Randomly changed content, different from the original."""
    while True:
        changed, place = bytearray(content), rng.randrange(len(content))
        kind = rng.choice(("bit", "bytes", "number", "cut", "double", "splice"))
        length = rng.choice((1, 4, 16, 64))
        if kind == "bit":
            changed[place] ^= 1 << rng.randrange(8)
        elif kind == "bytes":
            changed[place : place + length] = rng.choice((b"\0" * length, b"\xff" * length, rng.randbytes(length)))
        elif kind == "number":  # most formats have sizes in their first bytes
            place = rng.randrange(min(64, len(content) - 4))
            big = rng.choice((0, 1, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 30000))
            changed[place : place + 4] = big.to_bytes(4, rng.choice(("big", "little")))
        elif kind == "cut":
            del changed[place:]
        elif kind == "double":
            changed[place:place] = changed[place : place + length]
        else:
            other = files[rng.choice(sorted(files))]
            start = rng.randrange(len(other))
            changed[place : place + length] = other[start : start + length]
        if changed and bytes(changed) != content:
            return bytes(changed)


def read_cases() -> None:
    """In a separate process: reads the cases from stdin, prints a line for each."""
    from fedjax_ssl.data.folder import load_folder, load_pictures
    from fedjax_ssl.data.npz import load_npz
    from fedjax_ssl.errors import UserError

    folder = pathlib.Path(sys.argv[1])
    limit_memory(MEMORY)

    def ways(name: str, content: bytes) -> list:
        """The arrays from each way of reading, or the error's line."""
        if name.startswith("NPZ"):
            path = folder / "set.npz"
            path.write_bytes(content)
            readers = [lambda: load_npz(str(path))]
        else:
            files = [folder / "set" / f"{place}" / "image.png" for place in ("train/a", "train/b", "test/a")]
            for file in files:
                file.parent.mkdir(parents=True, exist_ok=True)
            for file in files:
                file.write_bytes(content)
            readers = [
                lambda: load_folder(str(folder / "set"), 8),
                lambda: load_pictures(str(folder / "set" / "test"), (8, 8, 3), "crop", "--images"),
            ]
        results = []
        for read in readers:
            try:
                results.append(tuple(read()))
            except UserError as error:
                results.append(str(error))
        return results

    said_aside = (folder / "stderr").open("w+b")  # includes messages of C decoders
    os.dup2(said_aside.fileno(), 2)
    for name, original, changed in pickle.loads(sys.stdin.buffer.read()):
        wanted = ways(name, original)
        assert not any(isinstance(each, str) for each in wanted), wanted
        said_aside.truncate(0)
        said_aside.seek(0)
        signal.alarm(SECONDS)
        try:
            got = ways(name, changed)
        except Exception as error:
            print("tracebacks", f"{type(error).__name__}: {error}".split("\n")[0][:150], sep="\t", flush=True)
            continue
        finally:
            signal.alarm(0)
        said = [each for each in got if isinstance(each, str)]
        sys.stderr.flush()
        said_aside.seek(0)
        aside = said_aside.read().decode(errors="replace").splitlines()
        if any("warn" in line or "Traceback" in line for line in aside):
            print("tracebacks", f"stderr: {aside[-1][:150]}", sep="\t", flush=True)
        elif any("\n" in line or len(line) > 600 for line in said):
            print("tracebacks", f"not one line: {said[0][:150]!r}", sep="\t", flush=True)
        elif len(said) == len(got):
            print("told", said[0].replace("\t", " "), sep="\t", flush=True)
        elif aside:
            print("told", "read, with a line of its decoder", sep="\t", flush=True)
        elif said:
            print("silent", "one reader alone noticed", sep="\t", flush=True)
        elif name.startswith(WITH_CHECKSUM) and not all(map(_equal, wanted, got)):
            print("silent", "other pixels", sep="\t", flush=True)
        else:
            print("right", "", sep="\t", flush=True)


def _equal(one: tuple, other: tuple) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other))
