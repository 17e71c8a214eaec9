"""Decodes images once into a memory-mapped npy file in the user's cache, so that they take no memory afterwards."""

import contextlib
import hashlib
import io
import math
import os
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from fedjax_ssl.base.errors import UserError, first_line, say
from fedjax_ssl.base.files import private_cache, replaced
from fedjax_ssl.data.arrays import MAX_BYTES
from fedjax_ssl.data.content import row_sums

MOST_CACHE_BYTES = 50_000_000_000  # for all data sets; the least recently used are deleted
TOLD_EVERY = 1024  # images
Shape = tuple[int, ...]

# Pillow's names of the accepted formats. Unrestricted, Pillow recognises many more by their first bytes, whatever the
# file's name, and starts Ghostscript for some.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_GREY_MODES = ("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N")  # Pillow's names
_MODES = {1: "L", 3: "RGB"}  # by the number of channels


class Encoded(Protocol):
    """An image file inside another file. Its text, as `str` gives it, is for messages."""

    def read(self) -> bytes: ...


Picture = pathlib.Path | Encoded


def decode_once(
    pictures: Sequence[Picture], known_by: str, name: object, image_size: int, fit: str, tell: Callable[[str], Any]
) -> tuple[np.ndarray, int, np.ndarray]:
    """All images of a data set, uint8 [N, H, W, C]; their `depth_of`; and their `row_sums`, uint64 [N].

    They are memory-mapped, or in memory without a cache. A file of the cache ends with their depth, a checksum of the
    file's key and this depth, and the images' checksums; if it is not what was written it is made again, with a line.

    Args:
        pictures: the image files; one is read at a time.
        known_by: identifies these pictures, for example by their files' sizes and times.
        name: of the data set, for messages.
        image_size, fit: see `read_image`; with size 0 all images must have the same size.
        tell: called with a line about the progress.

    Raises:
        UserError: a picture is not an image, sizes differ, images are too large, or the cache cannot be written.
    """
    import PIL

    folder = private_cache("images", MOST_CACHE_BYTES)
    if folder is None:
        shape, bits, decoded = _decoded(pictures, name, image_size, fit, MAX_BYTES, tell)
        images = np.empty(shape, np.uint8)
        for row, image in enumerate(decoded):
            images[row] = image
        return images, bits, row_sums(images)
    known_by = f"with checksums, TIFF by libtiff, {PIL.__version__} {image_size} {fit} {known_by}"
    key = hashlib.sha256(known_by.encode(errors="surrogateescape")).hexdigest()
    file = folder / f"{key}.npy"
    if (found := _kept(file, key, name)) is not None:
        return found
    shape, bits, decoded = _decoded(pictures, name, image_size, fit, MOST_CACHE_BYTES, tell)
    try:
        with replaced(file) as out:
            np.lib.format.write_array_header_1_0(out, {"descr": "|u1", "fortran_order": False, "shape": shape})
            sums = np.empty(len(pictures), "<u8")
            for row, image in enumerate(decoded):
                out.write(image.tobytes())
                sums[row] = row_sums(image[np.newaxis])[0]
            out.write(_end(key, bits, sums))
        return np.load(file, mmap_mode="r"), bits, sums
    except OSError as error:
        what = "make room, or choose another folder by the environment variable XDG_CACHE_HOME"
        raise UserError(f"{file}: {first_line(error)}; the images of {name} are decoded there: {what}") from error


def _end(key: str, bits: int, sums: np.ndarray) -> bytes:
    """What follows the images in a file of the cache."""
    return bytes([bits]) + hashlib.sha256(f"{key} {bits}".encode()).digest() + sums.tobytes()


def _kept(file: pathlib.Path, key: str, name: object) -> tuple[np.ndarray, int, np.ndarray] | None:
    """What `decode_once` returns, from a file of the cache, whose time of use is set; None: it must be made."""
    if not file.exists():
        return None
    try:
        images = np.load(file, mmap_mode="r")
        if images.dtype != np.uint8:
            raise ValueError("it has other numbers")
        sums = row_sums(images)
        with file.open("rb") as opened:
            opened.seek(images.offset + images.nbytes)
            if not (end := opened.read()) or end != _end(key, end[0], sums):
                raise ValueError("it is not what was written")
        # Not the time of the last change: others may have the file mapped.
        os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))
    except Exception as error:  # a damaged header raises whatever Python's parser does
        say(f"warning: {file}: {first_line(error)}; the images of {name} are decoded again")
        return None
    return images, end[0], sums


def _decoded(
    pictures: Sequence[Picture], name: object, image_size: int, fit: str, most: int, tell: Callable[[str], Any]
) -> tuple[Shape, int, Iterator[np.ndarray]]:
    """The shape of the array of all images, their `depth_of`, and the images one by one; see `decode_once`."""
    headers = [_header(picture) for picture in pictures]
    channels = 1 if all(is_grey for is_grey, _ in headers) else 3
    first, bits = pictures[0], depth_of([picture for picture, (_, is_deep) in zip(pictures, headers) if is_deep])
    height, width = (image_size,) * 2 if image_size else read_image(first, _MODES[channels], 0, fit, bits).shape[:2]
    shape = len(pictures), height, width, channels
    check_size(shape, name, most)

    def decode() -> Iterator[np.ndarray]:
        for number, picture in enumerate(pictures, start=1):
            image = read_image(picture, _MODES[channels], image_size, fit, bits)
            if image.shape != shape[1:]:
                has = f"{image.shape[1]} x {image.shape[0]} pixels, but {first} {width} x {height}"
                raise UserError(f"{picture} has {has}; --config.data.image_size=N brings all to N x N")
            yield image
            if number % TOLD_EVERY == 0 or number == len(pictures):
                tell(f"decoding the images of {name}: {number:,} of {len(pictures):,}")

    return shape, bits, decode()


def check_size(shape: Shape, name: object, most: int, remedy: str = "set a smaller data.image_size, or ") -> None:
    """Raises a UserError if uint8 images of this shape take more bytes than `most`."""
    if math.prod(shape) > most:
        take = f"take {math.prod(shape) / 1e9:.1f} GB at {shape[2]} x {shape[1]} pixels"
        what = f"at most {most / 1e9:g} GB are read; {remedy}give fewer images"
        raise UserError(f"the {shape[0]} images of {name} {take}, but {what}")


def _header(picture: Picture) -> tuple[bool, bool]:
    """Whether an image is grey, and whether it has more than 8 bits per channel, according to its header."""
    with _open(picture) as image:
        is_deep = image.mode.startswith("I") or any(";16" in str(tile[3]) for tile in image.tile)
        if image.mode == "P":  # A palette, which GIFs always have; it may hold only greys.
            red, green, blue = np.reshape(image.getpalette("RGB"), (-1, 3)).T
            return bool(np.array_equal(red, green) and np.array_equal(green, blue)), is_deep
        return image.mode in _GREY_MODES, is_deep


def depth_of(pictures: Sequence[Picture]) -> int:
    """How many bits the pixels of those images need that have more than 8 bits per channel; 0: there are none.

    A microscope's 12 bits, for example, are stored in 16. The number is that of all images together, from 8 to 16, and
    each pixel keeps the higher 8 of these bits. Images with 8 bits per channel stay as they are.

    Prints the number, and a warning if a tenth of these images are so dark that 16 grey levels of 256 are left, but for
    a hundredth of their pixels, which may be broken. Raises a UserError if one in colour needs fewer than 16 bits, of
    which Pillow reads the higher 8 alone.
    """
    needed, mostly, coloured = [], [], None
    deep = [picture for picture in pictures if _header(picture)[1]]
    for picture in deep:
        with _open(picture) as image:
            pixels = np.asarray(image)
            if image.mode.startswith("I"):
                needed.append(max(8, int(pixels.max()).bit_length()))
                mostly.append(max(8, int(np.percentile(pixels, 99)).bit_length()))
            else:  # the higher byte of each channel; the last one may be transparency
                pixels = pixels[..., :-1] if image.mode.endswith("A") else pixels
                needed.append(8 + int(pixels.max()).bit_length())
                mostly.append(needed[-1])
                coloured = picture
    if not needed:
        return 0
    bits = max(needed)
    if coloured is not None and bits < 16:
        why = f"the images need {bits} of them, and the higher 8 of a colour's 16 are read"
        raise UserError(f"{coloured} has 16 bits per channel, but {why}; save the images with 8 bits per channel")
    dark = [picture for picture, own in zip(deep, mostly) if own <= bits - 4]
    line = f"{len(deep):,} images of 16 bits per channel have values of {bits} bits; the higher 8 of these are kept"
    if len(dark) >= len(deep) / 10:
        line = f"warning: {line}, so that 16 grey levels are left of {len(dark):,} dark ones, such as {dark[0]}"
    say(line)
    return bits


def read_image(picture: Picture, mode: str, image_size: int, fit: str, bits: int) -> np.ndarray:
    """Reads one image as uint8 [H, W, C].

    Args:
        picture, mode: the file, and 'L' or 'RGB'.
        image_size: side in pixels to which the image is resized bilinearly, with antialiasing; 0: it keeps its size.
        fit: 'crop' first cuts out the largest centred square, 'stretch' resizes the whole image.
        bits: see `depth_of`.

    Raises:
        UserError: it cannot be read as an image, or has pixels of more bits.
    """
    from PIL import Image, ImageOps

    with _open(picture) as image:
        if image.format == "PNG":
            image.verify()  # checks the pixels' checksums, which `load` does not; afterwards the file must be reopened
    with _open(picture) as image:
        image.load()
        tags = getattr(image, "tag_v2", {})  # of a TIFF: 262 says which number is white, 339 whether it has a sign
        if image.mode == "L" and 2 in tags.get(339, ()):
            raise ValueError("pixels from -128 to 127; save them as 0 to 255")
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # Pillow's own conversion would clip values above 255.
            values = np.asarray(image)
            if values.min() < 0 or values.max() >= 2 ** min(bits, 16):
                raise ValueError(f"pixels from {values.min()} to {values.max()}; {min(bits, 16)} bits are read")
            values = 2**bits - 1 - values if tags.get(262) == 0 else values  # Pillow 13 inverts 8 bits alone
            image = Image.fromarray((values >> (bits - 8)).astype(np.uint8))
        if image.mode == "F":
            raise ValueError("pixels that are not whole numbers")
        image = image.convert(mode)
        if image_size:
            if fit == "crop":
                side = min(image.size)
                left, top = (image.width - side) // 2, (image.height - side) // 2
                # Cropped first: `resize` with a box would include pixels outside the box.
                image = image.crop((left, top, left + side, top + side))
            image = image.resize((image_size, image_size), Image.Resampling.BILINEAR)
        pixels = np.asarray(image)
    return pixels[..., np.newaxis] if mode == "L" else pixels


@contextlib.contextmanager
def _open(picture: Picture) -> Iterator[Any]:
    """Opens an image; an error inside becomes a UserError that names the picture."""
    from PIL import Image, TiffImagePlugin  # Only this source needs it.

    # Pillow 13.0's own reader mixes up the pixels of TIFFs that are turned, or have planes of 16 bits.
    TiffImagePlugin.READ_LIBTIFF = True
    opened = picture if isinstance(picture, pathlib.Path) else io.BytesIO(picture.read())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about tags; unreadable images raise errors anyway
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # more than 89 million pixels
            with Image.open(opened, formats=FORMATS) as image:
                yield image
    except Image.UnidentifiedImageError as error:
        known = ", ".join(FORMATS)
        raise UserError(f"{picture} cannot be read as an image of {known}; convert or remove it") from error
    except Exception as error:  # The errors of Pillow's decoders have no common base.
        raise UserError(f"{picture} cannot be read as an image ({first_line(error)}); replace or remove it") from error
