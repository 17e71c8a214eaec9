"""A federation larger than a device: what lies there is a round's clients alone, in a table of their own.

A view is a `FederatedData` in which `here` names the clients whose rows are present. All ids are those of the whole
federation, so methods and random numbers are the same with a view and without. It knows nothing of rounds or methods.
"""

import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data.federated import FederatedData, Holdings, small_arrays, unknown_table
from fedjax_ssl.data.table import image_table, table_shape
from fedjax_ssl.errors import UserError

MOST_ENTRIES = 2**24  # of a table of rows, clients x largest client, that is still kept as a whole: 64 MiB
# Shares of the rounds that the narrower widths serve. Each width is a program of its own.
SERVED = (0.5, 0.95)
_ALIGNED = 64  # bytes, of XLA's arrays on a processor


def widths_of(sizes: list[np.ndarray], clients: int) -> tuple[int, ...]:
    """The widths n_max of the rounds' tables, the smallest first; the last one has room for every client.

    There are several where a table of all clients would be large and a few clients are much larger than most. Residence
    does not count here: wherever data lie, a round has the same width, and so the same bits.

    Args:
        sizes: int [K], examples of each client, for each seed of a run.
        clients: of a round.
    """
    every = np.concatenate(sizes)
    widths = [max(1, int(every.max()))]
    if len(sizes[0]) * widths[0] > MOST_ENTRIES:
        for served in sorted(SERVED, reverse=True):
            width = int(np.quantile(every, served ** (1 / clients), method="higher"))
            if 2 * width <= widths[0]:
                widths.insert(0, max(1, width))
    return tuple(widths)


def narrowest(widths: tuple[int, ...], sizes: np.ndarray) -> int:
    """The smallest of `widths` that fits clients of these sizes, int [M]."""
    largest = int(sizes.max(initial=0))
    return next(width for width in widths if width >= largest)


class Views:
    """The views of a federation, for so many clients at a time."""

    def __init__(
        self,
        held: Holdings,
        widths: tuple[int, ...],
        clients: int,
        images: tuple[int, ...],
        on_device: bool,
        recalled: int = 0,
    ):
        """Puts on the device what all views share.

        Args:
            held: the federation.
            widths: see `widths_of`.
            clients: K' of a view.
            images: of each width, the most images of so many clients that fit it, see `most_images`.
            on_device: whether all images are kept there, so that a view has rows alone.
            recalled: clients besides those of a view whose records a round reads, at most.
        """
        self.held, self.widths, self.clients, self._images = held, widths, clients, images
        self.on_device, self._recalled = on_device, recalled
        self._shared = small_arrays(held)._replace(
            test_inputs=image_table(held.test_inputs),
            test_labels=jnp.asarray(held.test_labels),
            given_labels=jnp.asarray(held.given_labels),
            unknown_inputs=unknown_table(held),
        )
        self._file = _stamp(held.inputs)
        self._whole: tuple[FederatedData, jax.Array] | None = None
        targets = () if held.targets is None else (held.targets,)
        self._fixed = np.concatenate([held.server_index, held.validation_index, *targets]).astype(np.int64)
        if on_device:
            mislabelled = None if held.mislabelled is None else jnp.asarray(held.mislabelled)
            data = self._shared._replace(
                inputs=image_table(held.inputs),
                visible_labels=jnp.asarray(held.visible_labels),
                mislabelled=mislabelled,
            )
            self._whole = data, jnp.asarray(held.hidden_labels)
        else:
            ends = np.cumsum([len(held.server_index), len(held.validation_index)])
            parts = np.split(np.arange(len(self._fixed), dtype=np.int32), ends)
            self._shared = self._shared._replace(
                server_index=jnp.asarray(parts[0]),
                validation_index=jnp.asarray(parts[1]),
                targets=None if held.targets is None else jnp.asarray(parts[2]),
            )

    def width_for(self, clients: np.ndarray) -> int:
        """The smallest width that fits some clients."""
        return narrowest(self.widths, self.held.sizes[clients])

    def first(self) -> tuple[FederatedData, jax.Array]:
        """The view that a run begins with, and the true labels of its rows.

        Its clients fit the narrowest width, so its images take little. Its rows are as wide as the widest, so clients'
        memory has its largest shape.
        """
        width = self.widths[0]
        data, hidden = self.of(np.flatnonzero(self.held.sizes <= width)[: self.clients], width)
        wider = [(0, 0), (0, self.widths[-1] - width)]
        return data._replace(client_index=jnp.pad(data.client_index, wider)), hidden

    def of(self, clients: np.ndarray, width: int, share: tuple[int, int] = (0, 1)) -> tuple[FederatedData, jax.Array]:
        """The view of some clients, and the true labels of its rows.

        Args:
            clients: int [at most K'], increasing.
            width: one of `widths`, at least each one's size.
            share: (i, n): where images are not on the device, only the i-th of n equal parts of their table is read,
                and `inputs` is that part; see `joined`.

        Raises:
            UserError: the file of the images has changed.
        """
        held = self.held
        try:
            is_same = _stamp(held.inputs) == self._file
        except OSError:
            is_same = False
        if not is_same:
            raise UserError(f"{self._file[0]} has changed since the run began to read it; put the old file back")
        own = [held.rows_of(client) for client in clients]
        sizes = np.array([len(rows) for rows in own], np.int64)
        rows = np.concatenate([np.zeros(0, np.int32), *own])
        here = jnp.asarray(_padded(clients, self.clients, len(held.sizes)))
        ids = {"here": here, "recorded": self.recorded(clients)}
        index = np.zeros((self.clients, width), np.int32)
        present = np.arange(width) < np.pad(sizes, (0, self.clients - len(sizes)))[:, np.newaxis]
        if self._whole is not None:
            index[present] = rows
            data, hidden = self._whole
            return data._replace(client_index=jnp.asarray(index), **ids), hidden
        first = len(self._fixed)
        index[present] = first + np.arange(len(rows), dtype=np.int32)
        taken = np.concatenate([self._fixed, rows])
        room = max(1, first + self._images[self.widths.index(width)])

        def table(values: np.ndarray, index: int = 0, count: int = 1) -> Any:
            """The rows that are here, behind them room for those of larger cohorts."""
            size = -(-room // count)
            own = taken[index * size : (index + 1) * size]
            chosen = _aligned_zeros((size, *values.shape[1:]), values.dtype)
            np.take(values, own, axis=0, out=chosen[: len(own)], mode="clip")  # other modes copy once more
            return image_table(chosen, jax.device_put)

        data = self._shared._replace(
            inputs=table(held.inputs, *share),
            visible_labels=table(held.visible_labels),
            client_index=jnp.asarray(index),
            mislabelled=None if held.mislabelled is None else table(held.mislabelled),
            **ids,
        )
        return data, table(held.hidden_labels)

    def recorded(self, clients: np.ndarray) -> jax.Array | None:
        """`FederatedData.recorded` of a view with the records of some clients, increasing; None: those of `here`."""
        if not self._recalled:
            return None
        return jnp.asarray(_padded(clients, self.clients + self._recalled, len(self.held.sizes)))

    def joined(self, width: int, rows: Any) -> Any:
        """The table of images of a view, of the rows of all its parts one after the other, see `of`."""
        number = len(self.shapes(width)[1])
        return jax.tree.map(lambda leaf: leaf[:number], rows)

    def shapes(self, width: int) -> tuple[FederatedData, Any]:
        """The shapes of a view of this width, and of the true labels of its rows."""
        held, rows = self.held, len(self.held.hidden_labels)
        if self._whole is None:
            rows = max(1, len(self._fixed) + self._images[self.widths.index(width)])

        def table(values: np.ndarray) -> Any:
            return jax.ShapeDtypeStruct((rows, *values.shape[1:]), values.dtype)

        def rows_here(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        shared: FederatedData = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self._shared)
        data = shared._replace(
            inputs=table_shape(held.inputs, rows),
            visible_labels=table(held.visible_labels),
            client_index=rows_here(self.clients, width),
            mislabelled=None if held.mislabelled is None else table(held.mislabelled),
            here=rows_here(self.clients),
            recorded=rows_here(self.clients + self._recalled) if self._recalled else None,
        )
        return data, table(held.hidden_labels)


def _padded(clients: np.ndarray, number: int, num_clients: int) -> np.ndarray:
    """The ids of some clients, increasing, and behind them ids of nobody: int32 [number]."""
    ids = num_clients + np.arange(number, dtype=np.int32)
    ids[: len(clients)] = clients
    return ids


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros that begin where a processor's device takes them as they are; `jax.device_put` copies others."""
    size = math.prod(shape) * dtype.itemsize
    room = np.zeros(size + _ALIGNED, np.uint8)
    first = -room.ctypes.data % _ALIGNED
    return room[first : first + size].view(dtype).reshape(shape)


def _stamp(images: np.ndarray) -> tuple[Any, ...]:
    """The file of memory-mapped images, with its size and time; () of images in the memory."""
    path = getattr(images, "filename", None)
    if path is None:
        return ()
    found = os.stat(path)
    return path, found.st_size, found.st_mtime_ns, found.st_ino


def most_images(sizes: np.ndarray, widths: tuple[int, ...], clients: int) -> tuple[int, ...]:
    """Of each width, the images of so many clients that fit it, at most."""
    ordered = np.sort(sizes)[::-1]
    return tuple(int(ordered[ordered <= width][:clients].sum()) for width in widths)
