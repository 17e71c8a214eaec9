"""The table of all images, stored so that a device can gather rows without copying the table."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.base.devices import platform

_ALIGNED = 64  # bytes, alignment of XLA's arrays on CPUs


@jax.tree_util.register_pytree_node_class
class FlatTable:
    """An array [N, H, W, C] that is stored as [N, H*W*C].

    Indexing returns images [..., H, W, C], and other operations see the array [N, H, W, C]. TPUs store the last two
    axes of an array in tiles of at least 8 x 128. If images were stored as [N, H, W, C], each program would first copy
    them into four times their memory.
    """

    def __init__(self, flat: Any, example: tuple[int, ...]):
        """Takes rows [..., N, H*W*C] and the shape (H, W, C) of an example."""
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


def image_table(images: np.ndarray | None) -> Any:
    """Puts inputs on the device: on a TPU images [N, H, W, C] become a `FlatTable`, all else an array. None stays None.

    A CPU reads NumPy's `aligned` arrays where they are. A memory-mapped file is copied, as somebody may write into it.
    """
    if images is None:
        return None
    put = jnp.array if isinstance(images, np.memmap) else jax.device_put
    if platform() != "tpu" or images.ndim != 4:
        return put(images)
    return FlatTable(put(images.reshape(len(images), math.prod(images.shape[1:]))), images.shape[1:])


def aligned(array: np.ndarray) -> np.ndarray:
    """The array, read-only, in memory that `jax.device_put` does not copy on a CPU; a memory-mapped file stays one."""
    if not isinstance(array, np.memmap) and array.ctypes.data % _ALIGNED:
        moved = aligned_zeros(array.shape, array.dtype)
        moved[...] = array
        array = moved
    array.flags.writeable = False
    return array


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros in memory as in `aligned`."""
    size = math.prod(shape) * dtype.itemsize
    room = np.zeros(size + _ALIGNED, np.uint8)
    first = -room.ctypes.data % _ALIGNED
    return room[first : first + size].view(dtype).reshape(shape)


def table_shape(images: np.ndarray | None, length: int | None = None) -> Any:
    """The shapes that `image_table` returns, with `length` rows if that is given."""
    if images is None:
        return None
    shape = (len(images) if length is None else length, *images.shape[1:])
    if platform() != "tpu" or images.ndim != 4:
        return jax.ShapeDtypeStruct(shape, images.dtype)
    return FlatTable(jax.ShapeDtypeStruct((shape[0], math.prod(shape[1:])), images.dtype), shape[1:])
