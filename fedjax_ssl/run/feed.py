"""Feeds data to each dispatch of a run: the whole federation, or the clients of one round.

The clients of a round depend only on the seed and the round's number, so their images are read while the previous
round trains. Their memory and records return to the host after the round. If a round also recalls records of other
clients, these are read after the previous round.
"""

import concurrent.futures
import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.data.views import Views
from fedjax_ssl.engine.dispatch import Dispatch
from fedjax_ssl.engine.interface import Method, Problem, State
from fedjax_ssl.engine.round import round_keys, select_of
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.run import hosts
from fedjax_ssl.run.client_memory import ClientMemory
from fedjax_ssl.run.experiment import Experiment
from fedjax_ssl.run.machine import Machine


def cohort_of(problem: Problem, method: Method, data: FederatedData) -> Callable[[int], np.ndarray]:
    """Makes the function from a round's number to its clients: int32 [n], increasing, each once."""
    select = select_of(problem, method)

    @jax.jit
    def drawn(number: jax.Array, data: FederatedData) -> jax.Array:
        keys = round_keys(data.seed, number)
        return select(State(number, Model({}, ()), {}, {}), data, keys.select).clients

    return lambda number: np.unique(np.asarray(drawn(jnp.int32(number), data)))


class WholeFeed:
    """All clients are on the device: one program has many rounds."""

    most_rounds: float = math.inf  # of a dispatch

    def __init__(self, put: Callable[[Any], Any], program: Any, data: FederatedData, hidden_labels: jax.Array):
        self._put, self._program, self._data, self._hidden = put, program, data, hidden_labels

    def dispatch(self, state: State, done: int, rounds: int) -> Dispatch:
        """Trains `rounds` rounds after the first `done`."""
        return self._program(state, self._data, self._hidden, self._put(jnp.int32(rounds)))


class CohortFeed:
    """Each dispatch is one round with its clients. A thread reads the clients of the next round."""

    most_rounds = 1

    def __init__(
        self,
        put: Callable[[Any], Any],
        programs: Mapping[int, Any],
        views: Views,
        cohort: Callable[[int], np.ndarray],
        memory: ClientMemory | None,
        last: int,
    ):
        """Reads nothing yet. The programs are by the width of a view; for `cohort` see `cohort_of`."""
        self._put, self._programs, self._views, self._cohort = put, programs, views, cohort
        self._memory, self._last = memory, last
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "reader")
        self._next: tuple[int, concurrent.futures.Future[Any]] | None = None

    def dispatch(self, state: State, done: int, rounds: int) -> Dispatch:
        """Trains one round, see `WholeFeed.dispatch`."""
        del rounds
        if self._next is None or self._next[0] != done:
            self._next = done, self._reader.submit(self._read, done)
        clients, width, (data, hidden), images = self._next[1].result()
        if images is not None:  # hosts must exchange in the same order, so not in the thread
            data = data._replace(inputs=self._put(self._views.joined(width, hosts.rows_of_all(images))))
        if self._memory is not None:
            state, data = self._memory.join(state, clients, data)
        if done + 1 < self._last:
            self._next = done + 1, self._reader.submit(self._read, done + 1)
        result = self._programs[width](state, data, hidden, self._put(jnp.int32(1)))
        if self._memory is None:
            return result
        self._memory.keep(clients, data.record_ids, result.state.of_clients, done + 1)
        return result._replace(state=result.state._replace(clients={}, records={}))

    def close(self) -> None:
        """Ends the thread without waiting, since what it reads is not needed."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _read(self, number: int) -> tuple[np.ndarray, int, Any, Any]:
        """The clients, the width, the view; and, with several hosts, the part of the images that this host reads."""
        clients = self._cohort(number)
        width = self._views.width_for(clients)
        data, hidden = self._views.of(clients, width, (hosts.index(), hosts.count()))
        if hosts.count() == 1 or self._views.on_device:
            return clients, width, self._put((data, hidden)), None
        return clients, width, self._put((data._replace(inputs=jnp.zeros(0)), hidden)), data.inputs


Feed = WholeFeed | CohortFeed


def make_feed(
    machine: Machine,
    programs: Mapping[int, Any],
    experiment: Experiment,
    data: FederatedData,
    hidden_labels: jax.Array,
    memory: ClientMemory | None,
) -> contextlib.AbstractContextManager[Feed]:
    """Makes the feed of a group of runs; leaving the context ends its reading thread.

    `experiment` is of the run, or of the first of several that share the lanes; data and labels are of all of them.
    """
    if experiment.views is None:
        return contextlib.nullcontext(WholeFeed(machine.put, programs[data.width], data, hidden_labels))
    cohort = cohort_of(experiment.problem, experiment.method, experiment.data)
    last = experiment.problem.config.num_rounds
    return contextlib.closing(CohortFeed(machine.share, programs, experiment.views, cohort, memory, last))
