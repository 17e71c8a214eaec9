"""What each dispatch of a run gets: the whole federation, or the clients of one round.

A round draws its clients from the seed and its number alone. So their images can be read while the round before trains,
and their memory comes back to the host when their round is over.
"""

import concurrent.futures
import contextlib
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.data.views import Views
from fedjax_ssl.engine.dispatch import Dispatch
from fedjax_ssl.engine.interface import Method, Problem, State
from fedjax_ssl.engine.round import round_keys, select_of
from fedjax_ssl.errors import UserError
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.records.client_rows import ClientRows
from fedjax_ssl.records.manifest import partition_sum
from fedjax_ssl.records.workdir import CLIENTS, Workdir
from fedjax_ssl.run import hosts
from fedjax_ssl.run.dependence import reads_each, trace
from fedjax_ssl.run.experiment import Experiment
from fedjax_ssl.run.machine import Machine

CACHE_BYTES = 256 * 2**20  # of the clients' memory on the host, with residence.clients='disk'
DEFAULT = -1  # the row that every client has before it was asked


def cohort_of(problem: Problem, method: Method, data: FederatedData) -> Callable[[int], np.ndarray]:
    """The clients of a round, by its number: int32 [n], increasing, each once."""
    select = select_of(problem, method)

    @jax.jit
    def drawn(number: jax.Array, data: FederatedData) -> jax.Array:
        keys = round_keys(data.seed, number)
        return select(State(number, Model({}, ()), {}, {}), data, keys.select).clients

    return lambda number: np.unique(np.asarray(drawn(jnp.int32(number), data)))


class Feed(Protocol):
    """What a dispatch gets besides the state."""

    def rounds(self, wanted: int) -> int:
        """How many rounds the next dispatch has, at most."""
        ...

    def dispatch(self, state: State, done: int, rounds: int) -> Dispatch:
        """Trains so many rounds after the first `done`."""
        ...


class WholeFeed:
    """All clients are on the device: one program has many rounds."""

    def __init__(self, put: Callable[[Any], Any], program: Any, data: FederatedData, hidden_labels: jax.Array):
        self._put, self._program, self._data, self._hidden = put, program, data, hidden_labels

    def rounds(self, wanted: int) -> int:
        return wanted

    def dispatch(self, state: State, done: int, rounds: int) -> Dispatch:
        return self._program(state, self._data, self._hidden, self._put(jnp.int32(rounds)))


class CohortFeed:
    """The clients of one round at a time. The next round's are read by a thread."""

    def __init__(
        self,
        put: Callable[[Any], Any],
        programs: Mapping[int, Any],
        views: Views,
        cohort: Callable[[int], np.ndarray],
        memory: "ClientMemory | None",
        last: int,
    ):
        """Reads nothing yet.

        Args:
            put: a tree of arrays -> the same on every device.
            programs: by the width of a view.
            views: of the federation.
            cohort: the clients of a round, see `cohort_of`.
            memory: of the clients; None where the method has none.
            last: the last round's number.
        """
        self._put, self._programs, self._views, self._cohort = put, programs, views, cohort
        self._memory, self._last = memory, last
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "reader")
        self._next: tuple[int, concurrent.futures.Future[Any]] | None = None

    def rounds(self, wanted: int) -> int:
        del wanted
        return 1

    def dispatch(self, state: State, done: int, rounds: int) -> Dispatch:
        del rounds
        if self._next is None or self._next[0] != done:
            self._next = done, self._reader.submit(self._read, done)
        clients, width, (data, hidden), images = self._next[1].result()
        if images is not None:  # all processes exchange something in the same order, so not in the thread
            data = data._replace(inputs=self._put(self._views.joined(width, hosts.rows_of_all(images))))
        if self._memory is not None:
            state = state._replace(clients=self._put(self._memory.read(clients, data)))
        if done + 1 < self._last:
            self._next = done + 1, self._reader.submit(self._read, done + 1)
        result = self._programs[width](state, data, hidden, self._put(jnp.int32(1)))
        if self._memory is None:
            return result
        self._memory.keep(clients, result.state.clients, done + 1)
        return result._replace(state=result.state._replace(clients={}))

    def close(self) -> None:
        """Waits for nobody: what is being read is not needed."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _read(self, number: int) -> tuple[np.ndarray, int, Any, Any]:
        """The clients, the width, the view; and of several hosts the part of the images that this one reads."""
        clients = self._cohort(number)
        width = self._views.width_for(clients)
        data, hidden = self._views.of(clients, width, (hosts.index(), hosts.count()))
        if hosts.count() == 1 or self._views.on_device:
            return clients, width, self._put((data, hidden)), None
        return clients, width, self._put((data._replace(inputs=jnp.zeros(0)), hidden)), data.inputs


class ClientMemory:
    """The memory of clients on the host, or on the disk with a cache on the host.

    Of several hosts the first one keeps it, and sends each round's rows to the others.
    """

    def __init__(
        self,
        path: pathlib.Path | None,
        run: str,
        from_round: int | None,
        sizes: np.ndarray,
        of_examples: Any,
        renewed: Any,
        first: Callable[[FederatedData], Any],
        cache_bytes: float,
    ):
        """Opens the file in the run's folder.

        Args:
            path, run, from_round: see `ClientRows`. No path: another host keeps the memory.
            sizes: int [K], examples of each client.
            of_examples: for each leaf the axis of one client's memory whose length is n_max; -1: none.
            renewed: for each leaf whether it begins differently with each client.
            first: the memory of a view's clients before the first round.
            cache_bytes: of rows that may wait on the host; more go to the disk.
        """
        self._rows = None if path is None else ClientRows(path, run, from_round)
        self._sizes, self._first = sizes, first
        self._structure = jax.tree.structure(of_examples)
        self._axes, self._renewed = jax.tree.leaves(of_examples), jax.tree.leaves(renewed)
        self._cache: dict[int, list[np.ndarray]] = {}
        self._waiting: dict[int, int] = {}  # the round that wrote a row which the file has not
        self._bytes, self._most = 0.0, cache_bytes
        self._like: list[np.ndarray] = []  # one client's memory before the first round, of the largest width

    def begin(self, clients: Any) -> None:
        """Keeps how every client's memory begins: the first row of leaves [K', ...] of the largest width."""
        self._like = [np.asarray(leaf[0]) for leaf in jax.tree.leaves(clients)]
        if self._rows is not None:
            self._rows.write(DEFAULT, 0, _bytes(self._like))

    def resume(self, shapes: Any) -> None:
        """Reads how it began, of leaves of these shapes."""
        self._like = [np.zeros(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(shapes)]
        self._like = hosts.tree_from_first(self._written_default, self._like)

    def _written_default(self) -> list[np.ndarray]:
        assert self._rows is not None
        written = self._rows.read(DEFAULT)
        if written is None or len(written) != len(_bytes(self._like)):
            raise UserError("the file of the clients' memory does not fit this run; train in another workdir")
        return _arrays(written, [(leaf.shape, leaf.dtype) for leaf in self._like])

    def read(self, clients: np.ndarray, data: FederatedData) -> Any:
        """The memory of a view's clients, leaves [K', ...]; of one that was never asked what it begins with."""
        count, fresh = len(data.ids), None
        leaves = [np.repeat(self._cut(like, axis, data.width)[None], count, axis=0) for like, axis in self._leaves()]
        found = [self._row(int(client)) for client in clients]
        # All hosts must run a program, or none; whose rows there are only the first one knows.
        if any(self._renewed) and (hosts.count() > 1 or any(row is None for row in found)):
            fresh = jax.tree.leaves(jax.device_get(self._first(data)))
            leaves = [new.copy() if renews else leaf for leaf, new, renews in zip(leaves, fresh, self._renewed)]
        for place, row in enumerate(found):
            for leaf, axis, own in zip(leaves, self._axes, row or ()):
                there: Any = (
                    place,
                    *(slice(own.shape[axis] if number == axis else None) for number in range(own.ndim)),
                )
                leaf[there] = own
        self._bound_cache()
        leaves = hosts.tree_from_first(lambda: leaves, leaves)
        return jax.tree.unflatten(self._structure, leaves)

    def keep(self, clients: np.ndarray, leaves: Any, round_number: int) -> None:
        """Keeps the memory of a view's clients after a round, leaves [K', ...]."""
        if self._rows is None:
            return
        leaves = jax.device_get(leaves)
        for place, client in enumerate(int(client) for client in clients):
            size = int(self._sizes[client])
            own = [self._cut(leaf[place], axis, size) for leaf, axis in zip(jax.tree.leaves(leaves), self._axes)]
            self._remember(client, [np.array(leaf, order="C") for leaf in own])
            self._waiting[client] = round_number
        self._bound_cache()

    def commit(self, round_number: int, kept: list[int]) -> None:
        """The file has everything until a round; see `ClientRows.commit`."""
        self._write()
        if self._rows is not None:
            self._rows.commit(round_number, kept)

    def close(self) -> None:
        """What is not committed is lost."""
        if self._rows is not None:
            self._rows.close()

    def _bound_cache(self) -> None:
        if self._bytes > self._most:
            self._write()
            self._cache.clear()
            self._bytes = 0.0

    def _leaves(self) -> list[tuple[np.ndarray, int]]:
        return list(zip(self._like, self._axes))

    def _remember(self, client: int, own: list[np.ndarray]) -> None:
        self._bytes += sum(leaf.nbytes for leaf in own) - sum(leaf.nbytes for leaf in self._cache.get(client, ()))
        self._cache[client] = own

    def _row(self, client: int) -> list[np.ndarray] | None:
        if client not in self._cache:
            written = None if self._rows is None else self._rows.read(client)
            if written is None:
                return None
            size = int(self._sizes[client])
            cut = [self._cut(like, axis, size) for like, axis in self._leaves()]
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


def run_of(experiment: Experiment) -> str:
    """Names a run in the file of its clients' memory."""
    return f"seed {experiment.problem.config.seed}, partition {partition_sum(experiment.partition)}"


def open_memory(
    machine: Machine, experiment: Experiment, folder: Workdir | None, from_round: int | None
) -> ClientMemory:
    """The memory of a run's clients, in the file of its folder.

    Args:
        machine: that the run is trained on.
        experiment: the run's.
        folder: the run's; None on a host that writes nothing.
        from_round: see `ClientRows`.
    """
    views, shape = experiment.views, experiment.state_shape.clients
    held_on_disk, of_examples = experiment.residence.clients == "disk", jax.tree.map(lambda _: -1, shape)
    if views is not None and len(views.widths) > 1:
        narrow = jax.eval_shape(experiment.init, views.shapes(views.widths[0])[0]).clients
        of_examples = jax.tree.map(_axis_of_examples, narrow, shape)
    traced = trace(lambda data: experiment.init(data).clients, experiment.data)
    renewed = [bool(found & {"[0].here", "[0].client_index"}) for found in reads_each(traced)]
    return ClientMemory(
        None if folder is None else folder.path / CLIENTS,
        run_of(experiment),
        from_round,
        np.array([len(rows) for rows in experiment.partition.client_rows]),
        of_examples,
        jax.tree.unflatten(jax.tree.structure(shape), renewed),
        machine.jit(lambda data: experiment.init(data).clients),
        CACHE_BYTES if held_on_disk else float("inf"),
    )


def _axis_of_examples(narrow: Any, wide: Any) -> int:
    """The axis of examples in one client's leaf, from its shapes [K', ...] at two widths; -1: none."""
    pairs = enumerate(zip(narrow.shape[1:], wide.shape[1:]))
    return next((number for number, (a, b) in pairs if a != b), -1)


def make_feed(
    machine: Machine,
    programs: Mapping[int, Any],
    experiment: Experiment,
    data: FederatedData,
    hidden_labels: jax.Array,
    memory: ClientMemory | None,
) -> contextlib.AbstractContextManager[Feed]:
    """What the dispatches of a group get; a thread that reads ahead ends with the context.

    Args:
        machine: that the programs were compiled for.
        programs: by the width of the clients' rows.
        experiment: of the run, or of the first of several that share the lanes.
        data, hidden_labels: of all these runs, on all devices.
        memory: of the clients, where it is not in the state.
    """
    if experiment.views is None:
        return contextlib.nullcontext(WholeFeed(machine.put, programs[data.width], data, hidden_labels))
    cohort = cohort_of(experiment.problem, experiment.method, experiment.data)
    last = experiment.problem.config.num_rounds
    return contextlib.closing(CohortFeed(machine.put, programs, experiment.views, cohort, memory, last))


def begin_memory(
    machine: Machine, experiment: Experiment, folder: Workdir | None, state: State, stack: contextlib.ExitStack
) -> tuple[State, ClientMemory | None]:
    """The first state of a run without its clients' memory, and that; the stack closes it."""
    if experiment.views is None or not jax.tree.leaves(state.clients):
        return state, None
    memory = stack.enter_context(contextlib.closing(open_memory(machine, experiment, folder, None)))
    memory.begin(jax.device_get(state.clients))
    memory.commit(0, [])
    return state._replace(clients={}), memory


def resume_memory(
    machine: Machine, experiment: Experiment, folder: Workdir | None, state: State, stack: contextlib.ExitStack
) -> tuple[State, ClientMemory | None]:
    """The same of a run that goes on, wherever the memory was when it ended."""
    shapes, was_inside = experiment.state_shape.clients, bool(jax.tree.leaves(state.clients))
    if not jax.tree.leaves(shapes) or was_inside == (experiment.views is None):
        if experiment.views is None or not jax.tree.leaves(shapes):
            return state, None
        memory = stack.enter_context(contextlib.closing(open_memory(machine, experiment, folder, int(state.round))))
        memory.resume(shapes)
        return state, memory
    if experiment.views is None:
        with contextlib.closing(open_memory(machine, experiment, folder, int(state.round))) as memory:
            memory.resume(shapes)
            number = experiment.problem.config.num_clients
            return state._replace(clients=memory.read(np.arange(number), machine.put(experiment.data))), None
    memory = stack.enter_context(contextlib.closing(open_memory(machine, experiment, folder, None)))
    rows = jax.device_get(state.clients)
    memory.begin(rows)
    memory.keep(np.arange(experiment.problem.config.num_clients), rows, int(state.round))
    memory.commit(int(state.round), [int(state.round)])
    return state._replace(clients={}), memory
