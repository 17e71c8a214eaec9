"""A user's data set in one npz file, checked before it is used."""

import numpy as np

from fedjax_ssl.data.arrays import Arrays, existing_path
from fedjax_ssl.errors import UserError, first_line

KEYS = ("x_train", "y_train", "x_test", "y_test")
MEDMNIST_KEYS = ("train_images", "train_labels", "test_images", "test_labels")  # in the order of KEYS


def load_npz(path: str) -> Arrays:
    """Loads a data set from an npz file.

    Args:
        path: the file. It holds x_train and x_test, uint8 [N, H, W] or [N, H, W, C] with C = 1 or 3, and
          y_train and y_test, integers [N] of 0 .. num_classes - 1 in which every class occurs at least once. Or it is
          a file of MedMNIST, with train_images, train_labels, test_images and test_labels, labels [N, 1], whose
          val_images and val_labels are left out.

    Returns:
        The arrays, the images with their channel axis, and the classes, named by their numbers.

    Raises:
        UserError: the file is missing or no npz, a key is missing, or an array is not as described above.

    Source of the second layout: Yang et al., "MedMNIST v2", Scientific Data, 2023.
    """
    with open_archive(path, "data.path", f"an npz file with the arrays {', '.join(KEYS)}") as archive:
        keys = max(KEYS, MEDMNIST_KEYS, key=lambda keys: len(set(keys) & set(archive.files)))
    raw = read_arrays(path, keys, field="data.path")
    train, train_labels, test, test_labels = keys
    if keys == MEDMNIST_KEYS:  # Labels have a column for each task; several are no classification into one of C.
        for key in (train_labels, test_labels):
            raw[key] = raw[key][:, 0] if raw[key].ndim == 2 and raw[key].shape[1] == 1 else raw[key]
    x_train = _check_images(path, train, raw[train])
    x_test = _check_images(path, test, raw[test])
    if x_train.shape[1:] != x_test.shape[1:]:
        raise UserError(
            f"{path}: images of {train} have shape {x_train.shape[1:]}, those of {test} {x_test.shape[1:]}; "
            "bring both to one height, width and number of channels"
        )
    y_train = _check_labels(path, train_labels, raw[train_labels], train, len(x_train))
    y_test = _check_labels(path, test_labels, raw[test_labels], test, len(x_test))
    classes = np.union1d(y_train, y_test)
    expected = np.arange(len(classes))
    if not np.array_equal(classes, expected):
        missing = int(expected[classes != expected][0])
        raise UserError(
            f"{path}: labels must be 0 to C - 1; the largest is {int(classes[-1])}, but no example has "
            f"label {missing}; renumber the classes from 0 without gaps"
        )
    if len(classes) < 2:
        raise UserError(f"{path}: every label is 0; a classifier needs examples of at least 2 classes")
    names = tuple(map(str, range(len(classes))))
    return Arrays(x_train, y_train.astype(np.int32), x_test, y_test.astype(np.int32), len(classes), names)


def open_archive(path: str, field: str, wanted: str) -> np.lib.npyio.NpzFile:
    """Opens an npz file without reading its arrays; a context manager.

    Args:
        path: the file.
        field: the configuration field that gives the path, for messages.
        wanted: what the path must hold, for messages.

    Raises:
        UserError: the file is missing, or is not an npz.
    """
    file = existing_path(path, field, "file", wanted)
    try:
        archive = np.load(file, allow_pickle=False)
    except Exception as error:  # of any kind: zipfile and NumPy's parser of headers have a dozen
        raise UserError(f"{field}={path} is not an npz file ({first_line(error)}); write it with np.savez") from error
    if not isinstance(archive, np.lib.npyio.NpzFile):  # A single .npy array.
        raise UserError(f"{field}={path} holds one array and is not an npz file; write it with np.savez")
    return archive


def read_arrays(path: str, keys: tuple[str, ...], field: str, optional: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """Reads the named arrays of an npz file, without unpickling anything.

    Args:
        path: the file.
        keys: names of the arrays.
        field: the configuration field that gives the path, for messages.
        optional: names of arrays that are read where the file has them.

    Returns:
        The arrays by name.

    Raises:
        UserError: the file is missing, is not an npz, lacks a key, or an array cannot be read.
    """
    with open_archive(path, field, f"an npz file with the arrays {', '.join(keys)}") as archive:
        missing = [key for key in keys if key not in archive.files]
        if missing:
            raise UserError(
                f"{field}={path} has no {', '.join(missing)}; it must hold {', '.join(keys)} and holds "
                f"{', '.join(archive.files) or 'nothing'}"
            )
        arrays = {}
        for key in (*keys, *(key for key in optional if key in archive.files)):
            try:
                arrays[key] = archive[key]
                if not isinstance(arrays[key], np.ndarray):  # a member that is no .npy is given as bytes
                    raise ValueError("it is no array")
            except Exception as error:  # likewise
                raise UserError(
                    f"{field}={path}: {key} cannot be read ({first_line(error)}); write the file anew with "
                    "np.savez, numbers only"
                ) from error
    return arrays


def _check_images(path: str, key: str, images: np.ndarray) -> np.ndarray:
    """Returns the images as [N, H, W, C], or raises a UserError that says what they should be."""
    if images.dtype != np.uint8:
        raise UserError(f"{path}: {key} is {images.dtype}; images must be uint8, 0 to 255")
    if images.ndim not in (3, 4):
        raise UserError(f"{path}: {key} has shape {images.shape}; images must be [N, H, W] or [N, H, W, C]")
    if images.ndim == 4 and images.shape[3] not in (1, 3):
        raise UserError(f"{path}: {key} has shape {images.shape}, {images.shape[3]} channels; the last axis is 1 or 3")
    if images.size == 0:
        raise UserError(f"{path}: {key} is empty, its shape is {images.shape}; give at least one image")
    if images.ndim == 3:
        images = images[..., np.newaxis]
    return np.ascontiguousarray(images)


def _check_labels(path: str, key: str, labels: np.ndarray, images_key: str, num_images: int) -> np.ndarray:
    """Returns the labels, or raises a UserError that says what they should be."""
    if not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"{path}: {key} is {labels.dtype}; labels must be integers, 0 to C - 1")
    if labels.ndim != 1:
        raise UserError(f"{path}: {key} has shape {labels.shape}; labels must be [N], one integer an image")
    if len(labels) != num_images:
        raise UserError(
            f"{path}: {images_key} has {num_images} images but {key} {len(labels)} labels; give one an image"
        )
    if labels.min() < 0:
        row = int(np.argmin(labels))
        raise UserError(f"{path}: {key}[{row}] is {int(labels[row])}; labels must be 0 to C - 1")
    return labels
