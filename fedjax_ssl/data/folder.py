"""A user's data set as a folder of images by class, checked before it is used.

    FOLDER/train/CLASS/IMAGE and FOLDER/test/CLASS/IMAGE
    FOLDER/CLASS/IMAGE, where every fifth image of a class, in the order of their names, is for the test

Classes and images are taken in the order of their names (by code points, so 'B' stands before 'a' and '10' before '2'),
which is the same on every machine.
"""

import contextlib
import math
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.data.arrays import MAX_BYTES, Arrays, existing_path
from fedjax_ssl.errors import UserError, first_line

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
# Pillow's names of these. It would read many more by their first bytes whatever a file is called, and start
# Ghostscript for some.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
TEST_EVERY = 5  # where the folder has no test set of its own

_GREY_MODES = ("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N")  # Pillow's names
_OF_FILE_MANAGERS = ("Thumbs.db", "desktop.ini")  # written by file managers


FITS = ("crop", "stretch")  # how an image that is not a square is brought to one


def load_folder(path: str, image_size: int = 0, fit: str = "crop") -> Arrays:
    """Loads a data set from a folder of images by class.

    Images become RGB, or grey where all of them are: 8 bits a channel, the higher byte of 16-bit ones, without
    transparency, turned upright as their EXIF orientation says, of animations the first picture.

    Args:
        path: the folder, laid out as above. Hidden files and folders are ignored.
        image_size: side in pixels to which all images are resized bilinearly (with antialiasing, Pillow's). 0 leaves
          them as they are; then all must have one size.
        fit: 'crop' cuts out the largest square in the middle before; 'stretch' resizes the whole image, whatever its
          shape.

    Returns:
        The arrays. A class's label is the place of its folder's name among the sorted names.

    Raises:
        UserError: the folder is missing, not laid out as above, or larger than the memory should hold; a file is no
          image; sizes differ and `image_size` is 0.
    """
    root = existing_path(path, "data.path", "folder", "a folder of images by class, FOLDER/CLASS/IMAGE")
    try:
        train, test = _find_images(root)
    except OSError as error:
        raise UserError(f"data.path={path} cannot be listed ({first_line(error)}); make it readable") from error
    names = tuple(train)
    files = [file for images in (*train.values(), *test.values()) for file in images]
    images = _read_images(root, files, image_size, fit)
    y_train, y_test = (
        np.concatenate([np.full(len(split[name]), names.index(name), np.int32) for name in split])
        for split in (train, test)
    )
    count = len(y_train)
    return Arrays(images[:count], y_train, images[count:], y_test, len(names), names)


class Pictures(NamedTuple):
    """Images of a folder for a model that is trained."""

    images: np.ndarray  # uint8 [B, H, W, C]
    files: list[str]  # of each, as seen from the folder
    classes: list[str] | None  # of each, the name of the folder that it lies in; None if all lie in the folder itself


def load_pictures(path: str, image_shape: tuple[int, int, int], fit: str, field: str) -> Pictures:
    """Reads FOLDER/IMAGE, or FOLDER/CLASS/IMAGE, as a model takes them.

    Args:
        path: the folder. Hidden files are ignored.
        image_shape: (height, width, channels). To a square one images are brought as `load_folder` brings them; others
          must have its size. Of one channel they become grey.
        fit: see `load_folder`.
        field: that gives the path, for messages.

    Raises:
        UserError: the folder is missing, empty or larger than the memory should hold, or holds something else.
    """
    root = existing_path(path, field, "folder", "a folder of images, FOLDER/IMAGE or FOLDER/CLASS/IMAGE")
    height, width, channels = image_shape
    try:
        entries = _entries(root)
        folders = [entry for entry in entries if entry.is_dir()]
        if folders and len(folders) < len(entries):
            other = next(entry for entry in entries if not entry.is_dir())
            raise UserError(f"{root} holds folders and {other.name}; give images alone, or a folder for each class")
        files = [file for folder in folders or [root] for file in _images(folder)]
    except OSError as error:
        raise UserError(f"{field}={path} cannot be listed ({first_line(error)}); make it readable") from error
    _check_size(root, (len(files), *image_shape))
    images = np.empty((len(files), *image_shape), np.uint8)
    for row, file in enumerate(files):
        image = _read_image(file, "L" if channels == 1 else "RGB", height if height == width else 0, fit)
        if image.shape != image_shape:
            raise UserError(
                f"{file} has {image.shape[1]} x {image.shape[0]} pixels; the model takes {width} x {height}"
            )
        images[row] = image
    names = [file.relative_to(root).as_posix() for file in files]
    return Pictures(images, names, [file.parent.name for file in files] if folders else None)


def _find_images(root: pathlib.Path) -> tuple[dict[str, list[pathlib.Path]], dict[str, list[pathlib.Path]]]:
    """The images of the training and of the test set by class, all in the order of their names."""
    folders = [root / name for name in ("train", "test")]
    exists = [folder.is_dir() for folder in folders]
    if any(exists) and not all(exists):
        present, absent = folders if exists[0] else folders[::-1]
        raise UserError(
            f"{root} has a folder {present.name} but no {absent.name}; add {absent}/CLASS/IMAGE, or move the classes "
            f"from {present} to {root}, where every fifth image is for the test"
        )
    if not any(exists):
        classes = _classes(root)
        _check_number(root, classes)
        rows = {name: range(TEST_EVERY - 1, len(images), TEST_EVERY) for name, images in classes.items()}
        test = {name: [classes[name][row] for row in rows[name]] for name in classes if rows[name]}
        if not test:
            raise UserError(
                f"{root} has no class of {TEST_EVERY} or more images, so none would be for the test; add "
                f"images, or divide them into {folders[0]}/CLASS/IMAGE and {folders[1]}/CLASS/IMAGE"
            )
        train = {
            name: [image for row, image in enumerate(images) if row not in rows[name]]
            for name, images in classes.items()
        }
        return train, test
    train, test = map(_classes, folders)
    _check_number(folders[0], train)
    unknown = [name for name in test if name not in train]
    if unknown:
        raise UserError(
            f"the class {folders[1] / unknown[0]} has no training images; add {folders[0] / unknown[0]}, or remove it"
        )
    if not test:
        raise UserError(f"{folders[1]} has no class's folder; add {folders[1]}/CLASS/IMAGE")
    return train, test


def _check_number(folder: pathlib.Path, classes: dict[str, list[pathlib.Path]]) -> None:
    """Raises a UserError unless there are at least two classes."""
    if len(classes) < 2:
        has = f"the folder of one class, {next(iter(classes))}" if classes else "no class's folder"
        raise UserError(f"{folder} has {has}; a classifier needs at least 2 classes, {folder}/CLASS/IMAGE")


def _classes(folder: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    """Class -> its images, or a UserError for an image that has no class."""
    classes = {}
    for entry in _entries(folder):
        if entry.is_dir():
            classes[entry.name] = _images(entry)
        elif entry.suffix.lower() in SUFFIXES:
            raise UserError(f"the image {entry} is in no class's folder; move it to {folder}/CLASS, or remove it")
    return classes


def _images(folder: pathlib.Path) -> list[pathlib.Path]:
    """The images of one class, or a UserError for a file that is none: nothing is skipped silently."""
    images = _entries(folder)
    for entry in images:
        if entry.is_dir():
            raise UserError(f"{entry} is a folder inside a class's; move its images to {folder}, or remove it")
        if entry.suffix.lower() not in SUFFIXES:
            raise UserError(f"{entry} is not an image by its name; known: {', '.join(SUFFIXES)}; convert or remove it")
        if not entry.is_file():  # who opens a pipe waits for somebody to write into it
            raise UserError(f"{entry} cannot be read: it is not a file; remove it")
    if not images:
        raise UserError(f"the folder {folder} is empty; add images, or remove it")
    return images


def _entries(folder: pathlib.Path) -> list[pathlib.Path]:
    """What a folder holds, in the order of the names, without hidden files."""
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    return sorted((e for e in entries if e.name not in _OF_FILE_MANAGERS), key=lambda entry: entry.name)


def _read_images(root: pathlib.Path, files: list[pathlib.Path], image_size: int, fit: str) -> np.ndarray:
    """All images as one uint8 array [N, H, W, C]; see `load_folder`."""
    # The first pass reads headers only.
    mode, channels = ("L", 1) if all(map(_is_grey, files)) else ("RGB", 3)
    if image_size:
        height = width = image_size
    else:
        height, width = _read_image(files[0], mode, 0, fit).shape[:2]
    shape = (len(files), height, width, channels)
    _check_size(root, shape, "set a smaller data.image_size, or ")
    images = np.empty(shape, np.uint8)
    for row, file in enumerate(files):
        image = _read_image(file, mode, image_size, fit)
        if image.shape != shape[1:]:
            raise UserError(
                f"{file} has {image.shape[1]} x {image.shape[0]} pixels, but {files[0]} {width} x {height}; "
                "--config.data.image_size=N brings all to N x N"
            )
        images[row] = image
    return images


def _check_size(root: pathlib.Path, shape: tuple[int, ...], remedy: str = "") -> None:
    """Refuses images, uint8 of this shape, that the memory should not hold."""
    if math.prod(shape) > MAX_BYTES:
        raise UserError(
            f"the {shape[0]} images of {root} take {math.prod(shape) / 1e9:.1f} GB at {shape[2]} x {shape[1]} pixels, "
            f"but at most {MAX_BYTES / 1e9:g} GB are read; {remedy}give fewer images"
        )


def _is_grey(file: pathlib.Path) -> bool:
    """Whether an image has no colours, by its header."""
    with _open(file) as image:
        if image.mode == "P":  # A palette, as GIF always has one; it may hold nothing but greys.
            red, green, blue = np.reshape(image.getpalette("RGB"), (-1, 3)).T
            return bool(np.array_equal(red, green) and np.array_equal(green, blue))
        return image.mode in _GREY_MODES


def _read_image(file: pathlib.Path, mode: str, image_size: int, fit: str) -> np.ndarray:
    """One image, uint8 [H, W, C], in mode 'L' or 'RGB'."""
    from PIL import Image, ImageOps

    with _open(file) as image:
        if image.format == "PNG":
            image.verify()  # compares the pixels' checksums, which `load` leaves out; the file must be opened anew
    with _open(file) as image:
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # Pillow's own conversion would make 255 of everything above it.
            values = np.asarray(image)
            if values.min() < 0 or values.max() > 65535:
                raise ValueError("pixels of more than 16 bits")
            image = Image.fromarray((values >> 8).astype(np.uint8))
        if image.mode == "F":
            raise ValueError("pixels that are not whole numbers")
        image = image.convert(mode)
        if image_size:
            if fit == "crop":
                side = min(image.size)
                left, top = (image.width - side) // 2, (image.height - side) // 2
                # Cut out first: a resize with a box would let pixels from outside of it take part.
                image = image.crop((left, top, left + side, top + side))
            image = image.resize((image_size, image_size), Image.Resampling.BILINEAR)
        pixels = np.asarray(image)
    return pixels[..., np.newaxis] if mode == "L" else pixels


@contextlib.contextmanager
def _open(file: pathlib.Path) -> Iterator[Any]:
    """Opens an image; an error inside becomes a UserError that names the file."""
    from PIL import Image  # Only this source needs it.

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about tags; what cannot be read is an error besides
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # of more than 89 million pixels
            with Image.open(file, formats=FORMATS) as image:
                yield image
    except Image.UnidentifiedImageError as error:
        raise UserError(f"{file} cannot be read as an image of {', '.join(FORMATS)}; convert or remove it") from error
    except Exception as error:  # The errors of Pillow's decoders have no common base.
        raise UserError(f"{file} cannot be read as an image ({first_line(error)}); replace or remove it") from error
