"""Views of a federation that is larger than a device: only the clients of a round are on the device.

A view is a `FederatedData` in which `here` names the clients whose rows are present. All ids are those of the whole
federation, so methods and random numbers are the same with and without a view. Views know nothing of rounds or methods.
"""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data.federated import Attackers, FederatedData, Here, Holdings, small_arrays, table_width
from fedjax_ssl.data.table import aligned_zeros, image_table, table_shape

MOST_ENTRIES = 2**24  # largest table of rows (clients x largest client) that has only one width: 64 MiB
# Shares of rounds that fit the narrower widths. Each width needs its own program.
SERVED = (0.5, 0.95)


def widths_of(sizes: np.ndarray, clients: int) -> tuple[int, ...]:
    """The widths n_max of the rounds' tables, in ascending order; every client fits the last width.

    There are several widths if a table of all clients, whose `sizes` are int [K], would be large and a few clients are
    much larger than most. The result depends on the number of `clients` in a round, but not on residence (where data
    are kept), so a round always has the same width and equal results.
    """
    widths = [table_width(sizes)]
    if len(sizes) * widths[0] > MOST_ENTRIES:
        for served in sorted(SERVED, reverse=True):
            width = int(np.quantile(sizes, served ** (1 / clients), method="higher"))
            if 2 * width <= widths[0]:
                widths.insert(0, max(1, width))
    return tuple(widths)


class Views:
    """The views of a federation, for a fixed number of clients at a time."""

    def __init__(self, held: Holdings, widths: tuple[int, ...], clients: int, on_device: bool, recalled: int = 0):
        """Puts on the device what all views of a federation share.

        Args:
            held: the federation.
            widths: see `widths_of`.
            clients: number K' of clients in a view.
            on_device: whether all images stay on the device, so that views differ only in rows.
            recalled: the largest number of other clients whose records a round reads.
        """
        self.held, self.widths, self.clients = held, widths, clients
        self.on_device, self._recalled = on_device, recalled
        self._shared = small_arrays(held)._replace(
            test_inputs=image_table(held.test_inputs),
            test_labels=jax.device_put(held.test_labels),
            given_labels=jax.device_put(held.given_labels),
            unknown_inputs=image_table(held.unknown_inputs),
        )
        self._file = _stamp(held.inputs)
        self._whole: tuple[FederatedData, jax.Array] | None = None
        crafted = () if held.attackers is None or held.attackers.targets is None else (held.attackers.targets,)
        self._fixed = np.concatenate([held.server_index, held.validation_index, *crafted]).astype(np.int64)
        most = most_images(held.sizes, widths, clients)
        self._room = {width: max(1, len(self._fixed) + number) for width, number in zip(widths, most)}  # of a table
        if on_device:
            tables = {"inputs": image_table(held.inputs), "visible_labels": jax.device_put(held.visible_labels)}
            self._whole = self._shared._replace(**tables), jax.device_put(held.hidden_labels)
        else:
            ends = np.cumsum([len(held.server_index), len(held.validation_index)])
            parts = np.split(np.arange(len(self._fixed), dtype=np.int32), ends)
            self._shared = self._shared._replace(
                server_index=jax.device_put(parts[0]), validation_index=jax.device_put(parts[1])
            )
            if held.attackers is not None:
                targets = jax.device_put(parts[2]) if crafted else None
                attackers = self._shared.attackers._replace(mislabelled=None, targets=targets)
                self._shared = self._shared._replace(attackers=attackers)

    def width_for(self, clients: np.ndarray) -> int:
        """The smallest width that fits these clients."""
        largest = self.held.sizes[clients].max(initial=0)
        return next(width for width in self.widths if width >= largest)

    def first(self) -> tuple[FederatedData, jax.Array]:
        """The view with which a run begins, and the true labels of its rows.

        Its clients fit the narrowest width, so that its images take little memory. Its rows are padded to the largest
        width, so that the clients' memory has its largest shape.
        """
        width = self.widths[0]
        data, hidden = self.of(np.flatnonzero(self.held.sizes <= width)[: self.clients], width)
        wider = [(0, 0), (0, self.widths[-1] - width)]
        return data._replace(client_index=jnp.pad(data.client_index, wider)), hidden

    def of(self, clients: np.ndarray, width: int, share: tuple[int, int] = (0, 1)) -> tuple[FederatedData, jax.Array]:
        """The view of some clients, int [at most K'], ascending, and the true labels of its rows.

        `width` is one of `widths`, at least the size of each client. With `share` (i, n), if images are not on the
        device, only part i (from 0) of n equal parts of their table is read, and `inputs` is that part; see `joined`.
        Raises a UserError if the file with the images has changed.
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
        here = Here(jax.device_put(_padded(clients, self.clients, len(held.sizes))), self.recorded(clients))
        index = np.zeros((self.clients, width), np.int32)
        present = np.arange(width) < np.pad(sizes, (0, self.clients - len(sizes)))[:, np.newaxis]
        if self._whole is not None:
            index[present] = rows
            data, hidden = self._whole
            return data._replace(client_index=jax.device_put(index), here=here), hidden
        first = len(self._fixed)
        index[present] = first + np.arange(len(rows), dtype=np.int32)
        taken = np.concatenate([self._fixed, rows])

        def table(values: np.ndarray, index: int = 0, count: int = 1) -> Any:
            """The rows of this view, followed by room for those of larger cohorts."""
            size = -(-self._room[width] // count)
            own = taken[index * size : (index + 1) * size]
            chosen = aligned_zeros((size, *values.shape[1:]), values.dtype)
            np.take(values, own, axis=0, out=chosen[: len(own)], mode="clip")  # other modes copy once more
            return image_table(chosen)

        data = self._shared._replace(
            inputs=table(held.inputs, *share),
            visible_labels=table(held.visible_labels),
            client_index=jax.device_put(index),
            here=here,
            attackers=self._attackers_of(self._shared, table),
        )
        return data, table(held.hidden_labels)

    def recorded(self, clients: np.ndarray) -> jax.Array | None:
        """`Here.records` for a view with the records of these clients (ascending); None: those of its clients."""
        if not self._recalled:
            return None
        return jax.device_put(_padded(clients, self.clients + self._recalled, len(self.held.sizes)))

    def joined(self, width: int, rows: Any) -> Any:
        """The table of a view's images, from the rows of all its parts one after the other (see `share` in `of`)."""
        number = len(self.shapes(width)[1])
        return jax.tree.map(lambda leaf: leaf[:number], rows)

    def shapes(self, width: int) -> tuple[FederatedData, Any]:
        """The shapes of a view of this width, and of the true labels of its rows."""
        held = self.held
        rows = self._room[width] if self._whole is None else len(held.hidden_labels)

        def table(values: np.ndarray) -> Any:
            return jax.ShapeDtypeStruct((rows, *values.shape[1:]), values.dtype)

        def ids(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        shared: FederatedData = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self._shared)
        data = shared._replace(
            inputs=table_shape(held.inputs, rows),
            visible_labels=table(held.visible_labels),
            client_index=ids(self.clients, width),
            here=Here(ids(self.clients), ids(self.clients + self._recalled) if self._recalled else None),
            attackers=self._attackers_of(shared, table),
        )
        return data, table(held.hidden_labels)

    def _attackers_of(self, shared: FederatedData, table: Callable[[np.ndarray], Any]) -> Attackers | None:
        """The attackers, with the false labels of a view's rows."""
        held = self.held.attackers
        if held is None or held.mislabelled is None:
            return shared.attackers
        return shared.attackers._replace(mislabelled=table(held.mislabelled))


def _padded(clients: np.ndarray, number: int, num_clients: int) -> np.ndarray:
    """The ascending ids of some clients, followed by unused larger ids: int32 [number]."""
    ids = num_clients + np.arange(number, dtype=np.int32)
    ids[: len(clients)] = clients
    return ids


def _stamp(images: np.ndarray) -> tuple[Any, ...]:
    """The file of memory-mapped images, with its size, time and inode; () for images in memory."""
    path = getattr(images, "filename", None)
    if path is None:
        return ()
    found = os.stat(path)
    return path, found.st_size, found.st_mtime_ns, found.st_ino


def most_images(sizes: np.ndarray, widths: tuple[int, ...], clients: int) -> tuple[int, ...]:
    """For each width, the largest number of images that `clients` clients who fit it can have together."""
    ordered = np.sort(sizes)[::-1]
    return tuple(int(ordered[ordered <= width][:clients].sum()) for width in widths)
