"""A user's data set as a folder of images by class, checked before it is used.

    FOLDER/train/CLASS/IMAGE and FOLDER/test/CLASS/IMAGE; training images without a label in FOLDER/unlabelled/IMAGE
    FOLDER/CLASS/IMAGE, where every fifth image of a class, in the order of their names, is for the test

Classes and images are taken in the order of their names (by code points, so 'B' stands before 'a' and '10' before '2'),
which is the same on every machine.
"""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.data.arrays import MAX_BYTES, Arrays, existing_path
from fedjax_ssl.data.decoded import check_size, decode_once, read_image
from fedjax_ssl.errors import UserError, first_line

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
TEST_EVERY = 5  # where the folder has no test set of its own
UNLABELLED = "unlabelled"  # the folder beside train and test

_OF_FILE_MANAGERS = ("Thumbs.db", "desktop.ini")  # written by file managers


FITS = ("crop", "stretch")  # how an image that is not a square is brought to one


def load_folder(
    path: str, image_size: int = 0, fit: str = "crop", tell: Callable[[str], Any] = lambda text: None
) -> Arrays:
    """Loads a data set from a folder of images by class, which are decoded once, see `decode_once`.

    Images become RGB, or grey where all of them are: 8 bits a channel, the higher byte of 16-bit ones, without
    transparency, turned upright as their EXIF orientation says, of animations the first picture.

    Args:
        path: the folder, laid out as above. Hidden files and folders are ignored.
        image_size: side in pixels to which all images are resized bilinearly (with antialiasing, Pillow's). 0 leaves
          them as they are; then all must have one size.
        fit: 'crop' cuts out the largest square in the middle before; 'stretch' resizes the whole image, whatever its
          shape.
        tell: gets a line that says how far decoding is.

    Returns:
        The arrays. A class's label is the place of its folder's name among the sorted names; -1 is none.

    Raises:
        UserError: the folder is missing, not laid out as above, or larger than the cache holds; a file is no
          image; sizes differ and `image_size` is 0.
    """
    root = existing_path(path, "data.path", "folder", "a folder of images by class, FOLDER/CLASS/IMAGE")
    try:
        train, unlabelled, test = _find_images(root)
    except OSError as error:
        raise UserError(f"data.path={path} cannot be listed ({first_line(error)}); make it readable") from error
    names = tuple(train)
    files = [file for images in (*train.values(), unlabelled, *test.values()) for file in images]
    known_by = [str(root.resolve())]
    for file in files:
        found = file.stat()
        known_by.append(f"{file.relative_to(root)} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}")
    images = decode_once(files, "\n".join(known_by), root, image_size, fit, tell)
    y_train, y_test = (
        np.concatenate([np.full(len(split[name]), names.index(name), np.int32) for name in split])
        for split in (train, test)
    )
    y_train = np.concatenate([y_train, np.full(len(unlabelled), -1, np.int32)])
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
    check_size((len(files), *image_shape), root, MAX_BYTES, "")
    images = np.empty((len(files), *image_shape), np.uint8)
    for row, file in enumerate(files):
        image = read_image(file, "L" if channels == 1 else "RGB", height if height == width else 0, fit)
        if image.shape != image_shape:
            raise UserError(
                f"{file} has {image.shape[1]} x {image.shape[0]} pixels; the model takes {width} x {height}"
            )
        images[row] = image
    names = [file.relative_to(root).as_posix() for file in files]
    return Pictures(images, names, [file.parent.name for file in files] if folders else None)


def _find_images(
    root: pathlib.Path,
) -> tuple[dict[str, list[pathlib.Path]], list[pathlib.Path], dict[str, list[pathlib.Path]]]:
    """Training images by class, those without a label, and test images by class; all in the order of their names."""
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
        if UNLABELLED in classes:
            raise UserError(
                f"{root} has the folder {UNLABELLED!r} among its classes; move the classes to {folders[0]}/CLASS and "
                f"{folders[1]}/CLASS, or rename it if it is a class"
            )
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
        return train, [], test
    train, test = map(_classes, folders)
    _check_number(folders[0], train)
    unknown = [name for name in test if name not in train]
    if unknown:
        raise UserError(
            f"the class {folders[1] / unknown[0]} has no training images; add {folders[0] / unknown[0]}, or remove it"
        )
    if not test:
        raise UserError(f"{folders[1]} has no class's folder; add {folders[1]}/CLASS/IMAGE")
    unlabelled = root / UNLABELLED
    return train, _images(unlabelled) if unlabelled.is_dir() else [], test


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
