"""Loads a user's data set from one npz file, or from four npy files, which are memory-mapped; checks it."""

import zipfile
from collections.abc import Mapping

import numpy as np

from fedjax_ssl.base.errors import UserError, first_line
from fedjax_ssl.data.arrays import Arrays, existing_path

KEYS = ("x_train", "y_train", "x_test", "y_test")
MOST_TOKENS = 2**24 - 1  # largest token id: views of tokens pass through float32
MEDMNIST_KEYS = ("train_images", "train_labels", "test_images", "test_labels")  # in the order of KEYS
_FORMS = (
    "images are uint8 [N, H, W] or [N, H, W, C] with C = 1 or 3, features floats [N, D] or [N, V, D], tokens integers "
    "[N, L] or [N, V, L]"
)


def load_npz(path: str) -> Arrays:
    """Loads a data set from an npz file.

    Args:
        path: the file. It holds x_train and x_test, and y_train and y_test, integers [N] from 0 to num_classes - 1.
          Every class must occur; -1 in y_train means no label. Images are uint8 [N, H, W] or [N, H, W, C] with C = 1
          or 3. Features are floats [N, D], or [N, V, D] with V views. Texts are integer token ids [N, L] or [N, V, L].
          x_test has one view. MedMNIST's files also work, with train_images, train_labels, test_images and test_labels,
          labels [N, 1]; their val_images and val_labels are ignored.

    Returns:
        The arrays: images with a channel axis, features as float32, texts as int32. Classes are named by their numbers.

    Raises:
        UserError: the file is missing or not an npz, a key is missing, or an array is not as described above.

    Source of the second layout: Yang et al., "MedMNIST v2", Scientific Data, 2023.
    """
    with open_archive(path, "data.path", f"an npz file with the arrays {', '.join(KEYS)}") as archive:
        keys = max(KEYS, MEDMNIST_KEYS, key=lambda keys: len(set(keys) & set(archive.files)))
    return _checked(path, keys, read_arrays(path, keys, "data.path"))


def load_npy(path: str) -> Arrays:
    """Loads a data set from FOLDER/x_train.npy, y_train.npy, x_test.npy and y_test.npy, as `np.save` writes them.

    Args:
        path: the folder. The arrays are as in `load_npz`.

    Returns:
        The arrays; images are memory-mapped, so they take no memory and are not copied.

    Raises:
        UserError: the folder or a file is missing or damaged, or an array is invalid.
    """
    folder = existing_path(path, "data.path", "folder", f"a folder with {', '.join(f'{key}.npy' for key in KEYS)}")
    arrays = {}
    for key in KEYS:
        file = existing_path(str(folder / f"{key}.npy"), "data.path", "file", "it as np.save writes it")
        try:
            arrays[key] = np.lib.format.open_memmap(file, mode="r")
        except Exception as error:  # NumPy's errors have no common base
            raise UserError(f"{file} cannot be read ({first_line(error)}); write it anew with np.save") from error
    return _checked(path, KEYS, arrays)


def _checked(path: str, keys: tuple[str, ...], arrays: Mapping[str, np.ndarray]) -> Arrays:
    """The four arrays of a data set in their stored form; `keys` names them in the order of `KEYS`."""
    train, train_labels, test, test_labels = keys
    shape, shape_of_test = (_example(path, key, arrays[key]) for key in (train, test))
    form, form_of_test = (_form(arrays[key].dtype) for key in (train, test))
    if form != "images":
        _check_one_view(path, test, arrays[test])
        shape_of_test = (*shape[:-1], *shape_of_test[-1:])
    if (form, shape) != (form_of_test, shape_of_test):
        raise UserError(
            f"{path}: {train} is {arrays[train].dtype}, {form} of shape {shape}, and {test} {arrays[test].dtype}, "
            f"{form_of_test} of shape {shape_of_test}; bring both to one type and shape"
        )
    y_train, y_test = (
        _labels(path, of_labels, arrays[of_labels], key, len(arrays[key]))
        for key, of_labels in ((train, train_labels), (test, test_labels))
    )
    classes = np.union1d(y_train[y_train >= 0], y_test)
    if len(classes) < 2 or classes[-1] != len(classes) - 1:
        missing = next(label for label in range(len(classes) + 1) if label not in classes)
        raise UserError(
            f"{path}: labels must be 0 to C - 1 for at least 2 classes; the largest is {classes[-1]}, but no example "
            f"has label {missing}; renumber the classes from 0 without gaps"
        )
    x_train, x_test = (_stored(path, key, arrays[key], shape) for key in (train, test))
    return Arrays(x_train, y_train, x_test, y_test, len(classes), tuple(map(str, range(len(classes)))))


def open_archive(path: str, field: str, wanted: str) -> np.lib.npyio.NpzFile:
    """Opens an npz file as a context manager, without reading its arrays.

    Args:
        path: the file.
        field: the configuration field with the path, for messages; '' if there is none.
        wanted: what the path must hold, for messages.

    Raises:
        UserError: the file is missing, or is not an npz.
    """
    file, reason = existing_path(path, field, "file", wanted), ""
    try:
        archive = np.load(file, allow_pickle=False)
        if isinstance(archive, np.lib.npyio.NpzFile):
            return archive
        reason = " but one array"
    except (OSError, zipfile.BadZipFile) as error:
        reason = f" ({first_line(error)})"
    except Exception:  # NumPy takes any other file for a pickle, and would advise to unpickle it
        pass
    raise UserError(f"{_place(field, path)} is not an npz file{reason}; write it with np.savez")


def read_arrays(
    path: str, keys: tuple[str, ...] | None, field: str = "", optional: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
    """Reads the named arrays of an npz file without unpickling anything.

    Args:
        path: the file.
        keys: names of the arrays; None: all.
        field: see `open_archive`.
        optional: names of arrays that are read if the file has them.

    Returns:
        The arrays by name.

    Raises:
        UserError: the file is missing, is not an npz, or lacks a key; or an array cannot be read.
    """
    with open_archive(path, field, f"an npz file with the arrays {', '.join(keys or ('...',))}") as archive:
        has = archive.files
        keys = tuple(has) if keys is None else (*keys, *(key for key in optional if key in has))
        missing = [key for key in keys if key not in has]
        if missing:
            raise UserError(
                f"{_place(field, path)} has no {', '.join(missing)}; it must hold {', '.join(keys)} and holds "
                f"{', '.join(has) or 'nothing'}"
            )
        arrays = {}
        for key in keys:
            try:
                arrays[key] = archive[key]
            except Exception as error:  # The errors of zipfile, its decoders and NumPy have no common base.
                raise UserError(
                    f"{_place(field, path)}: {key} cannot be read ({_reason(error)}); write the file anew with "
                    "np.savez, numbers only"
                ) from error
            if not isinstance(arrays[key], np.ndarray):  # NumPy gives the bytes of a member that is not an array
                raise UserError(f"{_place(field, path)}: {key} cannot be read: it is not an array")
        return arrays


def _reason(error: Exception) -> str:
    """An error's first line; NumPy's advice to unpickle is left out."""
    line = first_line(error)
    return "it holds Python objects" if "allow_pickle" in line else line


def _place(field: str, path: str) -> str:
    return f"{field}={path}" if field else path


def _stored(path: str, key: str, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Converts inputs to their stored form; `shape` is that of one image."""
    if values.dtype == np.uint8:
        return values.reshape(-1, *shape)
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            values = values.astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise UserError(f"{path}: {key} has values that are not finite in float32")
        return values
    if values.min() < 0 or values.max() > MOST_TOKENS:
        raise UserError(f"{path}: {key} has {values.min()} to {values.max()}; tokens are 0 to {MOST_TOKENS}")
    return values.astype(np.int32)


def _form(dtype: np.dtype) -> str:
    return "images" if dtype == np.uint8 else "features" if dtype.kind == "f" else "tokens"


def _example(path: str, key: str, inputs: np.ndarray) -> tuple[int, ...]:
    """Returns the shape of one example, [H, W, C] for images; raises a UserError if the array is invalid."""
    if inputs.dtype == np.uint8:
        is_good = inputs.ndim == 3 or (inputs.ndim == 4 and inputs.shape[3] in (1, 3))
    else:
        is_good = inputs.dtype.kind in "fiu" and inputs.ndim in (2, 3)
    if not is_good or not inputs.size:
        raise UserError(f"{path}: {key} is {inputs.dtype} {inputs.shape}; {_FORMS}, N at least 1")
    return inputs.shape[1:] if inputs.dtype != np.uint8 else (*inputs.shape[1:], 1)[:3]


def _check_one_view(path: str, key: str, inputs: np.ndarray) -> None:
    """Raises a UserError if test examples have several views; examples with two axes look like views."""
    if inputs.ndim == 3 and inputs.shape[1] > 1:
        views, size = inputs.shape[1:]
        raise UserError(
            f"{path}: {key} is {inputs.dtype} {inputs.shape}, {views} views of each example, but a test example has "
            f"one: give {key}[:, 0]. If these are no views, save {views} x {size} numbers as [N, {views * size}], "
            "images as uint8"
        )


def _labels(path: str, key: str, labels: np.ndarray, inputs_key: str, number: int) -> np.ndarray:
    """Returns the labels as int32 [N]; raises a UserError if they are invalid."""
    if key in MEDMNIST_KEYS and labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]  # one column for each task; several tasks are not supported
    if labels.dtype.kind not in "iu" or labels.shape != (number,):
        raise UserError(
            f"{path}: {key} is {labels.dtype} {labels.shape}; labels must be integers ({number},), one for each "
            f"example of {inputs_key}"
        )
    least = -1 if key == KEYS[1] else 0  # a training example may have no label
    if labels.min() < least:
        row = int(np.argmin(labels))
        raise UserError(f"{path}: {key}[{row}] is {int(labels[row])}; labels must be 0 to C - 1")
    return np.array(labels, np.int32)
