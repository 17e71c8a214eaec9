"""Reads npz files of a run's folder whose arrays must fit each other."""

import pathlib
from collections.abc import Mapping

import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data.npz import read_arrays


def read_fitting(
    path: pathlib.Path, axes: Mapping[str, str], optional: Mapping[str, str] = {}, **lengths: int | None
) -> dict[str, np.ndarray]:
    """Reads the named arrays of an npz file.

    Args:
        axes: name -> NumPy's letters of the kind and a letter for each axis: 'iu KC' for integers [K, C]. An axis has
            the same length in all arrays.
        optional: the same for arrays that the file may lack.
        lengths: those that are known, such as C=10.

    Raises:
        UserError: the file cannot be read, lacks an array, or has one of another kind or shape.
    """
    found = read_arrays(str(path), tuple(axes), optional=tuple(optional))
    known = {axis: length for axis, length in lengths.items() if length is not None}
    for name, array in found.items():
        kinds, _, letters = {**axes, **optional}[name].partition(" ")
        has_kind = array.dtype.kind in kinds and array.ndim == len(letters)
        if not has_kind or any(known.setdefault(axis, size) != size for axis, size in zip(letters, array.shape)):
            raise UserError(f"{path}: {name} is {array.dtype} {array.shape}, which is not of this run")
    return found
