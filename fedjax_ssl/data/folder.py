"""Loads a user's data set from a folder of images by class, and checks it.

    FOLDER/train/CLASS/IMAGE and FOLDER/test/CLASS/IMAGE; training images without a label in FOLDER/unlabelled/IMAGE
    FOLDER/CLASS/IMAGE, where every fifth image of a class, sorted by name, is for testing

A class's folder may also be called `unlabelled`, see `read_labels`. Images are sorted by the names of their folders and
files. Names are compared by code points ('B' comes before 'a', and '10' before '2'), so the order is the same on every
machine.
"""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.base.errors import UserError, first_line
from fedjax_ssl.data.arrays import MAX_BYTES, Arrays, existing_path
from fedjax_ssl.data.decoded import check_size, decode_once, read_image
from fedjax_ssl.data.labels import has_no_label, read_labels
from fedjax_ssl.data.values import in_order, same

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
TEST_EVERY = 5  # used if the folder has no test set

_OF_FILE_MANAGERS = ("Thumbs.db", "desktop.ini")  # written by file managers


def load_folder(
    path: str, image_size: int = 0, fit: str = "crop", tell: Callable[[str], Any] = lambda text: None
) -> Arrays:
    """Loads a data set from a folder of images by class; images are decoded only once, see `decode_once`.

    Images become RGB, or grey if all of them are grey, with 8 bits per channel (the higher byte of 16-bit images) and
    without transparency. They are rotated according to their EXIF orientation. Of animations the first picture is used.

    Args:
        path: the folder, laid out as described above. Hidden files and folders are ignored.
        image_size: side in pixels to which all images are resized bilinearly (with Pillow's antialiasing). With 0 they
          keep their size, which must then be the same for all.
        fit: 'crop' first cuts out the largest centred square; 'stretch' resizes the whole image, whatever its shape.
        tell: called with a line about the progress of decoding.

    Returns:
        The arrays; classes are as in `read_labels`.

    Raises:
        UserError: the folder is missing, has another layout, or is larger than the cache; a file is not an image; or
          sizes differ and `image_size` is 0.
    """
    root = existing_path(path, "data.path", "folder", "a folder of images by class, FOLDER/CLASS/IMAGE")
    train, unlabelled, test = _find_images(root)
    files = [file for images in (*train.values(), unlabelled, *test.values()) for file in images]
    known_by = [str(root.resolve())]
    for file in files:
        found = file.stat()
        known_by.append(f"{file.relative_to(root)} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}")
    images = decode_once(files, "\n".join(known_by), root, image_size, fit, tell)
    of_train = [name for name in train for _ in train[name]] + [""] * len(unlabelled)
    declared = in_order(same(name) for name in _labelled(train))
    y_train, names = read_labels(of_train, f"the folders of {root}", declared)
    y_test = read_labels([name for name in test for _ in test[name]], f"the test folders of {root}", names).codes
    count = len(y_train)
    return Arrays(images[:count], y_train, images[count:], y_test, len(names), names)


class Pictures(NamedTuple):
    """Images of a folder as inputs for a trained model."""

    images: np.ndarray  # uint8 [B, H, W, C]
    files: list[str]  # path of each image, relative to the folder
    classes: list[str] | None  # name of each image's subfolder; None if there are no subfolders


def load_pictures(path: str, image_shape: tuple[int, int, int], fit: str, field: str) -> Pictures:
    """Reads FOLDER/IMAGE or FOLDER/CLASS/IMAGE as inputs for a model.

    Args:
        path: the folder. Hidden files are ignored.
        image_shape: (height, width, channels) of the model's inputs. If it is square, images are resized as in
          `load_folder`; otherwise they must have this size. With one channel they become grey.
        fit: see `load_folder`.
        field: the configuration field with the path, for messages.

    Raises:
        UserError: the folder is missing, empty or too large for memory, or holds something else.
    """
    root = existing_path(path, field, "folder", "a folder of images, FOLDER/IMAGE or FOLDER/CLASS/IMAGE")
    height, width, channels = image_shape
    has_classes = any(entry.is_dir() for entry in _entries(root))
    of_classes = _classes(root) if has_classes else {"": _images(root)}
    files = [file for images in of_classes.values() for file in images]
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
    return Pictures(images, names, [file.parent.name for file in files] if has_classes else None)


Classes = dict[str, list[pathlib.Path]]  # class -> its images


def _find_images(root: pathlib.Path) -> tuple[Classes, list[pathlib.Path], Classes]:
    """Finds training images by class, training images without a label, and test images by class, sorted by name."""
    train_folder, test_folder = root / "train", root / "test"
    is_divided = train_folder.is_dir() and test_folder.is_dir()
    if not is_divided:
        for present, absent in ((train_folder, test_folder), (test_folder, train_folder)):
            if present.is_dir():
                raise UserError(
                    f"{root} has a folder {present.name} but no {absent.name}; add {absent}/CLASS/IMAGE, or move the "
                    f"classes from {present} to {root}, where every fifth image is for the test"
                )
        return _divided(root)
    train, test = _classes(train_folder), _classes(test_folder)
    _check_number(train_folder, train)
    unknown = [name for name in _labelled(test) if same(name) not in map(same, train)]
    if unknown or not _labelled(test):
        raise UserError(
            f"{test_folder} must have folders of classes that {train_folder} has"
            + (f"; add {train_folder / unknown[0]}, or remove {test_folder / unknown[0]}" if unknown else "")
        )
    beside = [entry for entry in _entries(root) if entry.is_dir() and has_no_label(entry.name)]
    return train, [image for folder in beside for image in _images(folder)], _labelled(test)


def _divided(root: pathlib.Path) -> tuple[Classes, list[pathlib.Path], Classes]:
    """The same of a folder without a test set: every fifth image of a class is for testing."""
    classes = _classes(root)
    _check_number(root, classes)
    large = {name: images for name, images in _labelled(classes).items() if len(images) >= TEST_EVERY}
    test = {name: images[TEST_EVERY - 1 :: TEST_EVERY] for name, images in large.items()}
    if not test:
        raise UserError(
            f"{root} has no class of {TEST_EVERY} or more images, so none would be for the test; add images, or divide "
            f"them into {root}/train/CLASS/IMAGE and {root}/test/CLASS/IMAGE"
        )
    train = {name: [image for image in classes[name] if image not in test.get(name, ())] for name in classes}
    return train, [], test


def _labelled(classes: Classes) -> Classes:
    return {name: images for name, images in classes.items() if not has_no_label(name)}


def _check_number(folder: pathlib.Path, classes: Classes) -> None:
    """Raises a UserError unless there are at least two classes."""
    if len(classes) < 2:
        has = f"the folder of one class, {next(iter(classes))}" if classes else "no class's folder"
        raise UserError(f"{folder} has {has}; a classifier needs at least 2 classes, {folder}/CLASS/IMAGE")


def _classes(folder: pathlib.Path) -> Classes:
    """Class -> its images; raises a UserError for an image outside the folders of classes."""
    classes = {}
    for entry in _entries(folder):
        if entry.is_dir():
            classes[entry.name] = _images(entry)
        elif entry.suffix.lower() in SUFFIXES:
            raise UserError(f"the image {entry} is in no class's folder; move it to {folder}/CLASS, or remove it")
    return classes


def _images(folder: pathlib.Path) -> list[pathlib.Path]:
    """The images of one folder; raises a UserError for any other entry, so that nothing is skipped silently."""
    images = _entries(folder)
    for entry in images:
        if not entry.is_file() or entry.suffix.lower() not in SUFFIXES:
            raise UserError(
                f"{entry} is not an image file by its name; known: {', '.join(SUFFIXES)}; convert or remove it"
            )
    if not images:
        raise UserError(f"the folder {folder} is empty; add images, or remove it")
    return images


def _entries(folder: pathlib.Path) -> list[pathlib.Path]:
    """The entries of a folder except hidden files, sorted by name."""
    try:
        entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(f"{folder} cannot be listed ({first_line(error)}); make it readable") from error
    return sorted((e for e in entries if e.name not in _OF_FILE_MANAGERS), key=lambda entry: entry.name)
