"""The table of all images, in the form in which a device gathers rows from it without a copy."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.learning.devices import platform


@jax.tree_util.register_pytree_node_class
class FlatTable:
    """An array [N, H, W, C] that is stored as [N, H*W*C].

    Rows are taken from it as from an array, and other operations see the array. A TPU keeps the last two axes of an
    array in tiles of 8 x 128 or more: as [N, H, W, C] each program would first copy the images into four times their
    memory.
    """

    def __init__(self, flat: Any, example: tuple[int, ...]):
        """Takes rows [..., N, H*W*C] of examples of one shape (H, W, C)."""
        self.flat, self.example = flat, example

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.flat.shape[:-1], *self.example)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return self.flat.dtype

    def __len__(self) -> int:
        return len(self.flat)

    def __getitem__(self, rows: Any) -> jax.Array:
        taken = self.flat[rows]
        return taken.reshape(*taken.shape[:-1], *self.example)

    def __jax_array__(self) -> jax.Array:
        return self.flat.reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.flat).reshape(self.shape).astype(dtype or self.dtype)

    def tree_flatten(self) -> tuple[tuple[Any], tuple[int, ...]]:
        return (self.flat,), self.example

    @classmethod
    def tree_unflatten(cls, example: tuple[int, ...], leaves: tuple[Any]) -> "FlatTable":
        return cls(leaves[0], example)


def image_table(images: np.ndarray) -> Any:
    """Inputs on the device: images [N, H, W, C] on a TPU as a `FlatTable`, all others as an array."""
    if platform() != "tpu" or images.ndim != 4:
        return jnp.asarray(images)
    return FlatTable(jnp.asarray(images.reshape(len(images), -1)), images.shape[1:])


def table_shape(images: np.ndarray, length: int | None = None) -> Any:
    """The shapes of `image_table`; of so many rows, if a length is given."""
    shape = (len(images) if length is None else length, *images.shape[1:])
    if platform() != "tpu" or images.ndim != 4:
        return jax.ShapeDtypeStruct(shape, images.dtype)
    return FlatTable(jax.ShapeDtypeStruct((shape[0], math.prod(shape[1:])), images.dtype), shape[1:])
