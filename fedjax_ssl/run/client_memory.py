"""Keeps the clients' memory and the server's records of them outside of the device: on the host, or on the disk."""

import contextlib
import json
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.files import free_name
from fedjax_ssl.data.federated import FederatedData, Here
from fedjax_ssl.engine.interface import State
from fedjax_ssl.records.client_rows import ClientRows, Owner
from fedjax_ssl.records.manifest import partition_sum
from fedjax_ssl.records.workdir import CLIENTS, Workdir
from fedjax_ssl.run import hosts
from fedjax_ssl.run.dependence import reads_each, trace
from fedjax_ssl.run.experiment import Experiment
from fedjax_ssl.run.machine import Machine

CACHE_BYTES = 256 * 2**20  # of the clients' memory on the host, with residence.clients='disk'
DEFAULT = -1  # the id under which the file has the row that every client starts with


class ClientMemory:
    """The memory of clients and the server's records of them on the host, or on the disk with a cache on the host.

    With several hosts, the first one keeps it and sends each round's rows to the others.
    """

    def __init__(self, machine: Machine, experiment: Experiment, folder: Workdir | None, from_round: int | None):
        """Opens the file in the run's folder; `folder` is None if another host keeps the memory."""
        views, shape = experiment.views, experiment.state_shape.of_clients
        self._put, self._recorded = machine.put, make_recorded(machine, experiment)
        # A view's data -> its `State.of_clients` before the first round.
        self._first = machine.jit(lambda data: experiment.init(data).of_clients)
        self._sizes = np.array([len(rows) for rows in experiment.partition.client_rows])
        self._structure = jax.tree.structure(shape)
        # For each leaf, whether it belongs to the records.
        self._is_record = [bool(part) for part, tree in enumerate(shape) for _ in jax.tree.leaves(tree)]
        # For each leaf, the axis of a client's row with length n_max; -1: none.
        narrow = shape
        if views is not None and len(views.widths) > 1:
            narrow = jax.eval_shape(experiment.init, views.shapes(views.widths[0])[0]).of_clients
        self._axes = jax.tree.leaves(jax.tree.map(_axis_of_examples, narrow, shape))
        # For each leaf, whether its initial value depends on the client.
        data = experiment.data if views is not None else experiment.data._replace(here=Here(experiment.data.ids))
        traced = trace(lambda data: experiment.init(data).of_clients, data)
        of_view = {"[0].here.clients", "[0].here.records", "[0].client_index"}
        self._renewed = [bool(found & of_view) for found in reads_each(traced)]
        self._cache: dict[int, list[np.ndarray]] = {}
        self._waiting: dict[int, int] = {}  # client -> its row's round, for rows that are not in the file yet
        self._bytes = 0.0
        # Beyond it rows go to the disk.
        self._most = CACHE_BYTES if experiment.residence.clients == "disk" else float("inf")
        self._like: list[np.ndarray] = []  # one client's memory before the first round, of the largest width
        self._rows = None if folder is None else ClientRows(folder.path / CLIENTS, run_of(experiment), from_round)

    def begin(self, of_clients: Any) -> None:
        """Stores the row that every client starts with: the first row of leaves [K', ...] of the largest width."""
        self._like = [np.asarray(leaf[0]) for leaf in jax.tree.leaves(of_clients)]
        if self._rows is not None:
            self._rows.write(DEFAULT, 0, _bytes(self._like))

    def resume(self, shapes: Any) -> None:
        """Reads the row that every client starts with; `shapes` has leaves [K', ...]."""
        self._like = [np.zeros(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(shapes)]
        self._like = hosts.tree_from_first(self._written_default, self._like)

    def _written_default(self) -> list[np.ndarray]:
        written = self._rows.read(DEFAULT)
        if written is None or len(written) != len(_bytes(self._like)):
            raise UserError("the file of the clients' memory does not fit this run; train in another workdir")
        return _arrays(written, [(leaf.shape, leaf.dtype) for leaf in self._like])

    def join(self, state: State, clients: np.ndarray, data: FederatedData) -> tuple[State, FederatedData]:
        """Adds the rows of a view's clients, and of those that it recalls, to a state; returns both.

        The state is without rows of clients; `clients` are the ids of the view's clients, increasing.
        """
        if self._recorded is not None:
            data = data._replace(here=data.here._replace(records=self._put(self._recorded(state, clients))))
        memory, records = self._put(self.read(data))
        return state._replace(clients=memory, records=records), data

    def read(self, data: FederatedData) -> Any:
        """`State.of_clients` of a view, leaves [K', ...]; a client that never trained has its initial row."""
        ids = np.asarray(data.ids), np.asarray(data.record_ids)
        ids_of = [ids[is_record] for is_record in self._is_record]
        leaves = [
            np.repeat(self._cut(like, axis, data.width)[None], len(of_leaf), axis=0)
            for like, axis, of_leaf in zip(self._like, self._axes, ids_of)
        ]
        found = {int(client): self._row(int(client)) for client in np.union1d(*ids) if client < len(self._sizes)}
        # All hosts must run this program or none of them, and only the first host knows which rows exist.
        if any(self._renewed) and (hosts.count() > 1 or any(row is None for row in found.values())):
            fresh = jax.tree.leaves(jax.device_get(self._first(data)))
            leaves = [new.copy() if renews else leaf for leaf, new, renews in zip(leaves, fresh, self._renewed)]
        for number, (leaf, axis, of_leaf) in enumerate(zip(leaves, self._axes, ids_of)):
            for place, client in enumerate(of_leaf):
                if (row := found.get(int(client))) is not None:
                    own = row[number]
                    there: Any = (slice(own.shape[axis] if along == axis else None) for along in range(own.ndim))
                    leaf[(place, *there)] = own
        self._bound_cache()
        leaves = hosts.tree_from_first(lambda: leaves, leaves)
        return jax.tree.unflatten(self._structure, leaves)

    def keep(self, clients: np.ndarray, record_ids: Any, of_clients: Any, round_number: int) -> None:
        """Keeps the rows of some clients after a round.

        `clients` are the ids of those whose memory the state has, increasing; `record_ids` of those whose records it
        has, increasing: `clients`, and others with old records.
        """
        if self._rows is None:
            return
        leaves = jax.tree.leaves(jax.device_get(of_clients))
        records_at = np.searchsorted(np.asarray(record_ids), clients)
        for place, client in enumerate(int(client) for client in clients):
            rows = (leaf[records_at[place] if is_record else place] for leaf, is_record in zip(leaves, self._is_record))
            own = [self._cut(row, axis, int(self._sizes[client])) for row, axis in zip(rows, self._axes)]
            self._remember(client, [np.array(leaf, order="C") for leaf in own])
            self._waiting[client] = round_number
        self._bound_cache()

    def commit(self, round_number: int, kept: list[int]) -> None:
        """Writes and commits everything up to a round, see `ClientRows.commit`."""
        self._write()
        if self._rows is not None:
            self._rows.commit(round_number, kept)

    def close(self) -> None:
        """Closes the file; rows that are not committed are lost."""
        if self._rows is not None:
            self._rows.close()

    def _bound_cache(self) -> None:
        if self._bytes > self._most:
            self._write()
            self._cache.clear()
            self._bytes = 0.0

    def _remember(self, client: int, own: list[np.ndarray]) -> None:
        self._bytes += sum(leaf.nbytes for leaf in own) - sum(leaf.nbytes for leaf in self._cache.get(client, ()))
        self._cache[client] = own

    def _row(self, client: int) -> list[np.ndarray] | None:
        if client not in self._cache:
            written = None if self._rows is None else self._rows.read(client)
            if written is None:
                return None
            size = int(self._sizes[client])
            cut = [self._cut(like, axis, size) for like, axis in zip(self._like, self._axes)]
            self._remember(client, _arrays(written, [(leaf.shape, leaf.dtype) for leaf in cut]))
        return self._cache[client]

    def _write(self) -> None:
        for client, number in self._waiting.items() if self._rows is not None else ():
            self._rows.write(client, number, _bytes(self._cache[client]))
        self._waiting.clear()

    @staticmethod
    def _cut(leaf: np.ndarray, axis: int, length: int) -> np.ndarray:
        return leaf if axis < 0 else np.take(leaf, np.arange(min(length, leaf.shape[axis])), axis=axis)


def _bytes(leaves: list[np.ndarray]) -> bytes:
    return b"".join(leaf.tobytes() for leaf in leaves)


def _arrays(data: bytes, like: list[tuple[tuple[int, ...], Any]]) -> list[np.ndarray]:
    found, place = [], 0
    for shape, dtype in like:
        count = int(np.prod(shape))
        found.append(np.frombuffer(data, dtype, count, place).reshape(shape))
        place += count * np.dtype(dtype).itemsize
    return found


def run_of(experiment: Experiment) -> Owner:
    """The owner of a run's file of client memory."""
    config = experiment.problem.config
    name = f"seed {config.seed}, partition {partition_sum(experiment.partition, experiment.dataset)}"
    return Owner(name, json.loads(json.dumps(config.to_dict())))


def make_recorded(machine: Machine, experiment: Experiment) -> Callable[[State, np.ndarray], Any] | None:
    """Makes (state, a view's clients) -> `Here.records`: these and those that a round recalls; None if none."""
    views, recalls = experiment.views, experiment.method.recalls
    if views is None or recalls is None:
        return None
    program = machine.jit(recalls)

    def recorded(state: State, clients: np.ndarray) -> Any:
        asked = np.zeros(views.clients, np.int32)  # padded with client 0, whose result is not used
        asked[: len(clients)] = clients
        recalled = np.asarray(program(state, machine.put(asked)))[: len(clients)]
        return views.recorded(np.union1d(clients, recalled[recalled >= 0]))

    return recorded


def _axis_of_examples(narrow: Any, wide: Any) -> int:
    """The axis of examples in one client's leaf, from its shapes [K', ...] at two widths; -1: none."""
    pairs = enumerate(zip(narrow.shape[1:], wide.shape[1:]))
    return next((number for number, (a, b) in pairs if a != b), -1)


def place_memory(
    machine: Machine,
    experiment: Experiment,
    folder: Workdir | None,
    state: State,
    stack: contextlib.ExitStack,
    begins: bool,
) -> tuple[State, ClientMemory | None]:
    """Moves the clients' rows to where the run wants them: to a `ClientMemory`, which the stack closes, or the state.

    `state` is the first one, or that of a checkpoint, which has all rows or leaves them in the file beside it.
    """
    shapes, number = experiment.state_shape.of_clients, int(state.round)
    is_inside = bool(jax.tree.leaves(state.of_clients))
    if not jax.tree.leaves(shapes) or (experiment.views is None and is_inside):
        return state, None
    old = None if folder is None or begins or not is_inside else folder.path / CLIENTS
    if old is not None and old.exists():  # the older checkpoint may have its memory there
        os.rename(old, free_name(old.with_name(f"{CLIENTS}.set_aside")))
    memory = ClientMemory(machine, experiment, folder, None if is_inside else number)
    stack.callback(memory.close)
    if is_inside:
        rows = jax.device_get(state.of_clients)
        memory.begin(rows)
        if not begins:
            everyone = np.arange(experiment.problem.config.num_clients)
            memory.keep(everyone, everyone, rows, number)
        memory.commit(number, [] if begins else [number])
        return state._replace(clients={}, records={}), memory
    memory.resume(shapes)
    if experiment.views is not None:
        return state, memory
    clients, records = memory.read(machine.put(experiment.data))
    return state._replace(clients=clients, records=records), None
