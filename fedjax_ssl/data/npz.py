"""Loads a user's data set from one npz file, or from four npy files, which are memory-mapped; checks it."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_ssl.base.errors import UserError, first_line
from fedjax_ssl.data.arrays import existing_path
from fedjax_ssl.data.labels import Labels, read_labels
from fedjax_ssl.data.owners import read_names, read_owners
from fedjax_ssl.data.values import is_number

KEYS = ("x_train", "y_train", "x_test", "y_test")
CLIENTS = "client_train"  # optional, the client of each example of x_train
DOMAINS = ("domain_train", "domain_test")  # optional, the domain of each example of x_train and of x_test
MOST_TOKENS = 2**24 - 1  # largest token id: views of tokens pass through float32
MEDMNIST_KEYS = ("train_images", "train_labels", "test_images", "test_labels")  # in the order of KEYS
_FORMS = (
    "images are uint8 [N, H, W] or [N, H, W, C] with C = 1 or 3, features floats [N, D] or [N, V, D], tokens integers "
    "[N, L] or [N, V, L]"
)


def load_npz(path: str) -> dict[str, Any]:
    """Loads a data set from an npz file.

    Args:
        path: the file. It holds x_train and x_test, and y_train and y_test, labels [N] or [N, 1], see `read_labels`. A
            test example without a label is left out. client_train, numbers or texts [N], may name the client of each
            training example, domain_train and domain_test the domain of each example. Images are uint8 [N, H, W] or
            [N, H, W, C] with C = 1 or 3. Features are floats [N, D], or [N, V, D] with V views. Texts are integer token
            ids [N, L] or [N, V, L]. x_test has one view. MedMNIST's files also work, see `MEDMNIST_KEYS`; their
            val_images and val_labels are ignored.

    Returns:
        Fields of `Dataset`: images with a channel axis, features as float32, texts as int32.

    Raises:
        UserError: the file is missing or not an npz, a key is missing, or an array is not as described above.

    Source of the second layout: Yang et al., "MedMNIST v2", Scientific Data, 2023.
    """
    names = names_in(path, "data.path")
    keys = max(KEYS, MEDMNIST_KEYS, key=lambda keys: len(set(keys) & set(names)))
    return _checked(path, keys, read_arrays(path, keys, "data.path", optional=(CLIENTS, *DOMAINS)))


def load_npy(path: str) -> dict[str, Any]:
    """Loads a data set from FOLDER/x_train.npy, y_train.npy, x_test.npy, y_test.npy, as `np.save` writes them.

    The arrays are as in `load_npz`. Images are memory-mapped, so they take no memory and are not copied. Raises a
    UserError if the folder or a file is missing or damaged, or an array is invalid.
    """
    folder = existing_path(path, "data.path", "folder", f"a folder with {', '.join(f'{key}.npy' for key in KEYS)}")
    arrays = {}
    for key in (*KEYS, *(key for key in (CLIENTS, *DOMAINS) if (folder / f"{key}.npy").exists())):
        file = existing_path(str(folder / f"{key}.npy"), "data.path", "file", "it as np.save writes it")
        try:
            arrays[key] = np.lib.format.open_memmap(file, mode="r")
        except Exception as error:  # NumPy's errors have no common base
            raise UserError(f"{file} cannot be read ({first_line(error)}); write it anew with np.save") from error
    return _checked(path, KEYS, arrays)


def _checked(path: str, keys: tuple[str, ...], arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The fields of a data set from its arrays; `keys` names them in the order of `KEYS`."""
    train, train_labels, test, test_labels = keys
    (form, *shape), (form_of_test, *shape_of_test) = (_example(path, key, arrays[key]) for key in (train, test))
    if form != "images" and len(shape_of_test) == 2 and shape_of_test[0] > 1:
        views, size = shape_of_test
        line = f"{test} has {views} views of each example, but a test example has one: give {test}[:, 0]"
        otherwise = f"save {views} x {size} numbers as [N, {views * size}], images as uint8"
        raise UserError(f"{path}: {line}. If these are no views, {otherwise}")
    of_one_view = shape if form == "images" else shape[-1:]
    if (form, of_one_view) != (form_of_test, shape_of_test[-len(of_one_view) :]):
        both = f"{train} has {form} {shape}, {test} {form_of_test} {shape_of_test}"
        raise UserError(f"{path}: {both}; bring both to one type and shape")
    y_train, names = labels_in(path, train_labels, arrays[train_labels], arrays[train])
    y_test = labels_in(path, test_labels, arrays[test_labels], arrays[test], names).codes
    x_train, x_test = (_stored(path, key, arrays[key]) for key in (train, test))
    rows, known = np.arange(len(x_train)), np.flatnonzero(y_test >= 0)
    owners, domains = None, ()
    if CLIENTS in arrays:
        owners = read_owners(_named(path, CLIENTS, arrays, len(x_train)), rows, f"{path}: {CLIENTS}")
    if not arrays.keys().isdisjoint(DOMAINS):
        domains = tuple(
            read_names(_named(path, key, arrays, number), of_key, f"{path}: {key}", "domain")
            for key, number, of_key in zip(DOMAINS, (len(x_train), len(x_test)), (rows, known))
        )
    if len(known) < len(y_test):
        x_test, y_test = x_test[known], y_test[known]
    fields = dict(zip(KEYS, (x_train, y_train, x_test, y_test)))
    return {**fields, "num_classes": len(names), "class_names": names, "owners": owners, "domains": domains}


def _named(path: str, key: str, arrays: Mapping[str, np.ndarray], number: int) -> np.ndarray:
    """An array of names, one for each example; a UserError if it is missing or has another shape."""
    if (shape := arrays[key].shape if key in arrays else None) != (number,):
        has = "it is missing" if shape is None else f"its shape is {shape}"
        raise UserError(f"{path}: {key} must have a name for each of {number:,} examples, but {has}")
    return arrays[key]


def labels_in(
    path: str, key: str, labels: np.ndarray, examples: np.ndarray, names: Sequence[str] | None = None
) -> Labels:
    """Reads an array of labels, see `read_labels`; raises a UserError if it has not one for each example."""
    if not labels.ndim or not examples.ndim or len(labels) != len(examples):
        needs = f"{len(examples) if examples.ndim else 'no'} labels, one for each example"
        line = f"{key} is {labels.dtype} {labels.shape}; it needs {needs}: rename the array if it has something else"
        raise UserError(f"{path}: {line}")
    return read_labels(labels, f"{path}: {key}", names)


def known_labels(path: str, key: str, labels: np.ndarray, examples: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """The classes in an array of labels for a model with these classes, int32 [N], -1 for none; see `labels_in`.

    If no class is named by a number, numbers are the positions of classes.
    """
    if labels.dtype.kind in "iuf" and not any(map(is_number, names)):
        names = tuple(map(str, range(len(names))))
    return labels_in(path, key, labels, examples, names).codes


def names_in(path: str, field: str) -> list[str]:
    """The names of an npz file's arrays; see `read_arrays`."""
    with _opened(path, field) as archive:
        return archive.files


def read_arrays(
    path: str, keys: tuple[str, ...] | None, field: str = "", optional: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
    """Reads the named arrays of an npz file, by name, without unpickling anything.

    Args:
        path, field: the file, and the configuration field that names it, for messages; '' if there is none.
        keys: names of the arrays; None: all.
        optional: names of arrays that are read if the file has them.

    Raises:
        UserError: the file is missing, is not an npz, or lacks a key; or an array cannot be read.
    """
    with _opened(path, field) as archive:
        has = archive.files
        arrays = {key: np.asarray(archive[key]) for key in has if keys is None or key in (*keys, *optional)}
    missing = [key for key in keys or () if key not in has]
    if missing:
        holds = f"it must hold {', '.join(keys or ())} and holds {', '.join(has) or 'nothing'}"
        raise UserError(f"{_place(field, path)} has no {', '.join(missing)}; {holds}")
    return arrays


@contextlib.contextmanager
def _opened(path: str, field: str) -> Iterator[np.lib.npyio.NpzFile]:
    """Opens an npz file; an error inside becomes a UserError that names the file."""
    file = existing_path(path, field, "file", "an npz file")
    try:
        with file.open("rb") as opened, np.lib.npyio.NpzFile(opened, allow_pickle=False) as archive:
            yield archive
    except Exception as error:  # The errors of zipfile, its decoders and NumPy have no common base.
        # Not NumPy's advice to unpickle.
        reason = "it holds Python objects" if "allow_pickle" in str(error) else first_line(error)
        line = f"cannot be read as an npz file ({reason}); write it with np.savez, numbers only"
        raise UserError(f"{_place(field, path)} {line}") from error


def _place(field: str, path: str) -> str:
    return f"{field}={path}" if field else path


def _stored(path: str, key: str, values: np.ndarray) -> np.ndarray:
    """Converts inputs to their stored form."""
    if values.dtype == np.uint8:
        return values if values.ndim == 4 else values[..., np.newaxis]
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            values = values.astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise UserError(f"{path}: {key} has values that are not finite in float32")
        return values
    if values.min() < 0 or values.max() > MOST_TOKENS:
        raise UserError(f"{path}: {key} has {values.min()} to {values.max()}; tokens are 0 to {MOST_TOKENS}")
    return values.astype(np.int32)


def _example(path: str, key: str, inputs: np.ndarray) -> tuple[Any, ...]:
    """The form of inputs, and the axes of one example, [H, W, C] for images; a UserError if the array is invalid."""
    if inputs.dtype == np.uint8:
        form, is_good = "images", inputs.ndim == 3 or (inputs.ndim == 4 and inputs.shape[3] in (1, 3))
    else:
        form = "features" if inputs.dtype.kind == "f" else "tokens"
        is_good = inputs.dtype.kind in "fiu" and inputs.ndim in (2, 3)
    if not is_good or not inputs.size:
        raise UserError(f"{path}: {key} is {inputs.dtype} {inputs.shape}; {_FORMS}, N at least 1")
    return form, *inputs.shape[1:], *([1] if form == "images" and inputs.ndim == 3 else [])
