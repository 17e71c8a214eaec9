"""Loads a user's data set from one npz file, and checks it."""

import collections
import contextlib
import math
import struct
import zipfile
from collections.abc import Callable, Iterator
from typing import IO, NamedTuple

import numpy as np

from fedjax_ssl.data.arrays import MAX_BYTES, Arrays, existing_path
from fedjax_ssl.errors import UserError, first_line
from fedjax_ssl.files import expanded

KEYS = ("x_train", "y_train", "x_test", "y_test")
MOST_TOKENS = 2**24 - 1  # largest token id: views of tokens pass through float32
MEDMNIST_KEYS = ("train_images", "train_labels", "test_images", "test_labels")  # in the order of KEYS


class Member(NamedTuple):
    """What the header of a stored array says, before the array is read."""

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype
    # Offset of the array's numbers in the file, if they are stored uncompressed and in C order.
    start: int | None = None

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


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
        members = _find(archive, path, keys, "data.path", mapped=(keys[0], keys[2]))
        return checked_arrays(
            path,
            keys,
            members,
            lambda member: _read(archive, path, member, "data.path"),
            lambda member: _images(archive, path, member),
        )


def checked_arrays(
    path: str,
    keys: tuple[str, ...],
    members: dict[str, Member],
    read: Callable[[Member], np.ndarray],
    read_inputs: Callable[[Member], np.ndarray],
) -> Arrays:
    """Reads the four arrays of a data set and checks that they are as `load_npz` describes.

    Args:
        path: path of the data set, for messages.
        keys: names of the arrays, in the order of `KEYS`.
        members: the arrays' headers by name.
        read: reads labels.
        read_inputs: reads or memory-maps inputs.

    Raises:
        UserError: an array is invalid.
    """
    train, train_labels, test, test_labels = keys
    # Labels first: images are not read if something else is wrong.
    shapes = [_check_inputs(path, key, members[key]) for key in (train, test)]
    form, form_of_test = (_form(members[key].dtype) for key in (train, test))
    if form != form_of_test:
        raise UserError(
            f"{path}: {train} is {members[train].dtype}, {form}, and {test} {members[test].dtype}, {form_of_test}; "
            "save both as one type"
        )
    if form != "images":
        _check_one_view(path, members[test])
        shapes[1] = (*shapes[0][:-1], *shapes[1][-1:])
    if shapes[0] != shapes[1]:
        raise UserError(
            f"{path}: images of {train} have shape {shapes[0]}, those of {test} {shapes[1]}; "
            "bring both to one height, width and number of channels"
        )
    y_train, y_test = (
        _check_labels(path, of_labels, read(members[of_labels]), key, members[key])
        for key, of_labels in ((train, train_labels), (test, test_labels))
    )
    x_train, x_test = (_stored(path, key, read_inputs(members[key]), shapes[0]) for key in (train, test))
    classes = np.union1d(y_train[y_train >= 0], y_test)
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
    """Opens an npz file as a context manager, without reading its arrays.

    Args:
        path: the file.
        field: the configuration field with the path, for messages; '' if there is none.
        wanted: what the path must hold, for messages.

    Raises:
        UserError: the file is missing, is not an npz, or has two arrays with the same name.
    """
    file = existing_path(path, field, "file", wanted)
    try:
        archive = np.load(file, allow_pickle=False)
    except Exception as error:  # The errors of zipfile and NumPy have no common base.
        # NumPy takes any other file for a pickle and suggests unpickling it.
        reason = f" ({first_line(error)})" if isinstance(error, OSError | zipfile.BadZipFile) else ""
        raise UserError(f"{_place(field, path)} is not an npz file{reason}; write it with np.savez") from error
    if not isinstance(archive, np.lib.npyio.NpzFile):  # A single .npy array.
        raise UserError(f"{_place(field, path)} holds one array and is not an npz file; write it with np.savez")
    # NumPy finds a member by its name with or without '.npy'. With two members of one name, the header of one could be
    # combined with the numbers of the other.
    names = archive.zip.namelist()
    counts = collections.Counter([*names, *(name.removesuffix(".npy") for name in names if name.endswith(".npy"))])
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        archive.close()
        raise UserError(f"{_place(field, path)} has {min(twice, key=len)!r:.60} twice; write it again with np.savez")
    return archive


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
        UserError: the file is missing, is not an npz, or lacks a key; an array cannot be read; or all arrays together
            are too large.
    """
    with open_archive(path, field, f"an npz file with the arrays {', '.join(keys or ('...',))}") as archive:
        keys = tuple(archive.files) if keys is None else (*keys, *(key for key in optional if key in archive.files))
        return {key: _read(archive, path, member, field) for key, member in _find(archive, path, keys, field).items()}


def _find(
    archive: np.lib.npyio.NpzFile, path: str, keys: tuple[str, ...], field: str, mapped: tuple[str, ...] = ()
) -> dict[str, Member]:
    """Reads the headers of the named arrays, so that their sizes are known before anything is unpacked.

    Arrays named in `mapped` take no memory if the file stores them uncompressed.
    """
    missing = [key for key in keys if key not in archive.files]
    if missing:
        raise UserError(
            f"{_place(field, path)} has no {', '.join(missing)}; it must hold {', '.join(keys)} and holds "
            f"{', '.join(archive.files) or 'nothing'}"
        )
    members = {key: _header(archive, path, key, field) for key in keys}
    total = sum(member.bytes for member in members.values() if not (member.key in mapped and member.start is not None))
    if total > MAX_BYTES:
        raise UserError(
            f"{_place(field, path)}: {', '.join(members)} take {total / 1e9:.1f} GB, but at most {MAX_BYTES / 1e9:g} "
            "GB are read; give fewer or smaller images"
        )
    return members


def _header(archive: np.lib.npyio.NpzFile, path: str, key: str, field: str) -> Member:
    with _readable(path, key, field):
        name = f"{key}.npy" if f"{key}.npy" in archive.zip.namelist() else key
        with archive.zip.open(name) as opened:
            info = archive.zip.getinfo(name)
            member, by_columns = read_header(key, opened, info.file_size)
        if info.compress_type != zipfile.ZIP_STORED or by_columns:
            return member._replace(start=None)
        return member._replace(start=_offset(path, info) + member.start)


def read_header(key: str, opened: IO[bytes], size: int) -> tuple[Member, bool]:
    """Reads the header of an npy file and compares it with the file's size.

    Args:
        key: the array's name.
        opened: the file, positioned at its beginning.
        size: size of the file in bytes.

    Returns:
        The header, and whether the array is stored by columns.

    Raises:
        ValueError: it is not an array of numbers, or has another size.
    """
    version = np.lib.format.read_magic(opened)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read is None:
        raise ValueError("it is not an array of numbers")
    shape, by_columns, dtype = read(opened)
    member, rest = Member(key, shape, dtype, opened.tell()), size - opened.tell()
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are code")
    if min(shape, default=0) < 0 or member.bytes != rest:
        raise ValueError(f"its header says {member.bytes} bytes, and it has {rest}")
    return member, by_columns


def _offset(path: str, info: zipfile.ZipInfo) -> int:
    """Offset of a member's bytes in the file."""
    with expanded(path).open("rb") as file:
        file.seek(info.header_offset)
        header = file.read(30)
    lengths = struct.unpack("<HH", header[26:30])  # lengths of the name and the extra fields, which follow
    return info.header_offset + len(header) + sum(lengths)


def _images(archive: np.lib.npyio.NpzFile, path: str, member: Member) -> np.ndarray:
    """Reads inputs. If the file stores them uncompressed, checks all bytes and memory-maps them."""
    if member.start is None:
        return np.ascontiguousarray(_read(archive, path, member, "data.path"))
    with _readable(path, member.key, "data.path"):
        name = f"{member.key}.npy" if f"{member.key}.npy" in archive.zip.namelist() else member.key
        with archive.zip.open(name) as opened:
            while opened.read(2**20):  # zipfile compares the checksum at the end
                pass
        return np.memmap(expanded(path), member.dtype, "r", member.start, member.shape)


def _read(archive: np.lib.npyio.NpzFile, path: str, member: Member, field: str) -> np.ndarray:
    with _readable(path, member.key, field):
        return archive[member.key]


@contextlib.contextmanager
def _readable(path: str, key: str, field: str) -> Iterator[None]:
    """Turns any error of reading an array into a UserError."""
    try:
        yield
    except Exception as error:  # The errors of zipfile, its decoders and NumPy have no common base.
        raise UserError(
            f"{_place(field, path)}: {key} cannot be read ({first_line(error)}); write the file anew with np.savez, "
            "numbers only"
        ) from error


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


def _check_inputs(path: str, key: str, images: Member) -> tuple[int, ...]:
    """Returns the shape of one example, [H, W, C] for images; raises a UserError if the array is invalid."""
    if images.dtype != np.uint8 and images.dtype.kind in "fiu":
        if len(images.shape) not in (2, 3) or images.bytes == 0:
            raise UserError(
                f"{path}: {key} is {images.dtype} {images.shape}; features are floats [N, D] or [N, V, D], tokens "
                "integers [N, L] or [N, V, L], images uint8"
            )
        return images.shape[1:]
    if images.dtype != np.uint8:
        raise UserError(f"{path}: {key} is {images.dtype}; images must be uint8, 0 to 255")
    if len(images.shape) not in (3, 4):
        raise UserError(f"{path}: {key} has shape {images.shape}; images must be [N, H, W] or [N, H, W, C]")
    if len(images.shape) == 4 and images.shape[3] not in (1, 3):
        raise UserError(f"{path}: {key} has shape {images.shape}, {images.shape[3]} channels; the last axis is 1 or 3")
    if images.bytes == 0:
        raise UserError(f"{path}: {key} is empty, its shape is {images.shape}; give at least one image")
    return (*images.shape[1:], 1)[:3]


def _check_one_view(path: str, inputs: Member) -> None:
    """Raises a UserError if test examples have several views; examples with two axes look like views."""
    if len(inputs.shape) == 3 and inputs.shape[1] > 1:
        views, size = inputs.shape[1:]
        raise UserError(
            f"{path}: {inputs.key} is {inputs.dtype} {inputs.shape}, {views} views of each example, but a test example "
            f"has one: give {inputs.key}[:, 0]. If these are no views, save {views} x {size} numbers as "
            f"[N, {views * size}], images as uint8"
        )


def _check_labels(path: str, key: str, labels: np.ndarray, images_key: str, images: Member) -> np.ndarray:
    """Returns the labels as [N]; raises a UserError if they are invalid."""
    if key in MEDMNIST_KEYS and labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]  # one column for each task; several tasks are not supported
    if labels.dtype.kind not in "iu":  # not `np.issubdtype`, which counts time differences among the integers
        raise UserError(f"{path}: {key} is {labels.dtype}; labels must be integers, 0 to C - 1")
    if labels.ndim != 1:
        raise UserError(f"{path}: {key} has shape {labels.shape}; labels must be [N], one integer per image")
    if len(labels) != images.shape[0]:
        raise UserError(
            f"{path}: {images_key} has {images.shape[0]} images but {key} {len(labels)} labels; give one per image"
        )
    least = -1 if key == KEYS[1] else 0  # a training example may have no label
    if labels.min() < least:
        row = int(np.argmin(labels))
        raise UserError(f"{path}: {key}[{row}] is {int(labels[row])}; labels must be 0 to C - 1")
    return labels
