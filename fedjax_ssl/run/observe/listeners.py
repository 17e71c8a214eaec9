"""The listeners of a run in their order: a round's records are written before the checkpoint that relies on them."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_ssl.base.errors import TrainingError
from fedjax_ssl.data.federated import of_seed
from fedjax_ssl.engine.interface import State
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.clients import save_client_tests, test_figures
from fedjax_ssl.records.ending import VALIDATION_ACCURACY
from fedjax_ssl.records.lines import METRICS, TIMINGS
from fedjax_ssl.records.snapshots import save_snapshot
from fedjax_ssl.records.workdir import SNAPSHOTS
from fedjax_ssl.run import hosts
from fedjax_ssl.run.client_memory import ClientMemory
from fedjax_ssl.run.client_tests import clients_at_once, test_set_of
from fedjax_ssl.run.loop import Listener, Run, RunsTogether, Turn
from fedjax_ssl.run.machine import Machine
from fedjax_ssl.run.observe.clock import doing
from fedjax_ssl.run.observe.log import VERBOSE, say, warn
from fedjax_ssl.run.observe.summary import what_went_wrong
from fedjax_ssl.run.observe.trackers import Write
from fedjax_ssl.run.signals import Signals

ROUNDS_WITHOUT_LABELS = 5


class WriteRecords(Listener):
    """Writes each round's lines to metrics.jsonl and timings.jsonl."""

    def __init__(self, runs: list[Run]):
        self._runs = runs

    def take(self, turn: Turn) -> None:
        for run, lines, timings in zip(self._runs, turn.lines, turn.timings):
            run.folder.append(METRICS, lines)
            run.folder.append(TIMINGS, timings)


class FeedTrackers(Listener):
    """Sends each round's figures to TensorBoard and Weights & Biases."""

    def __init__(self, writers: list[list[Write]]):
        self._writers = writers

    def take(self, turn: Turn) -> None:
        for writers, lines, timings in zip(self._writers, turn.lines, turn.timings):
            rows = [{**line, "seconds": timing["seconds"]} for line, timing in zip(lines, timings)]
            for write in writers:
                write(rows)


class Advise(Listener):
    """Warns if no pseudo-label qualified for several rounds, or of rounds without uploads; first says its advice."""

    def __init__(self, advice: str, num_runs: int, late_count: bool = True):
        """Prints the method's advice, '' for none; `late_count`: late uploads count in the next round."""
        self._without, self._empty, self._late_count = [0] * num_runs, [0] * num_runs, late_count
        self._has_warned = False
        if advice:
            warn(advice)

    def take(self, turn: Turn) -> None:
        for index, lines in enumerate(turn.lines):
            for line in lines:
                nobody = line.get("qualified_per_client") == 0
                self._without[index] = self._without[index] + 1 if nobody else 0
                if self._is_empty(line):
                    if not any(self._empty):
                        warn(f"round {line['round']} has no upload: clients did not answer, or too late, and change "
                             "nothing (availability.never, availability.late)")  # fmt: skip
                    self._empty[index] += 1
        if turn.is_last and max(self._empty) > 1:
            warn(f"{max(self._empty)} rounds had no upload")
        if not self._has_warned and max(self._without) >= ROUNDS_WITHOUT_LABELS:
            self._has_warned = True
            warn(
                f"no pseudo-label has qualified for {max(self._without)} rounds: clients learn nothing from unlabelled "
                "images; a lower threshold of the method or more server.pretrain_epochs may help"
            )

    def _is_empty(self, line: dict[str, Any]) -> bool:
        late = 0 if self._late_count else line.get("late_uploads", 0)
        return ("answers" in line or late > 0) and line["uploads"] == late


class StopOnFailure(Listener):
    """Ends training if a round left no usable state: after its records are written, before the state is saved."""

    def __init__(self, runs: list[Run]):
        self._seeds = [run.experiment.problem.config.seed for run in runs]

    def take(self, turn: Turn) -> None:
        of_runs = zip(self._seeds, turn.healthy, turn.lines)
        failures = [f"seed {seed}, {what_went_wrong(lines[-1])}" for seed, healthy, lines in of_runs if not healthy]
        if failures:
            raise TrainingError("; ".join(failures))


class SaveSnapshots(Listener):
    """Saves the model's outputs on a set of images after the configured rounds and the last one.

    The set is the test set; before the last round it is the validation images, if there are any.
    """

    def __init__(self, group: RunsTogether, snapshots: Mapping[str, Callable[..., Any]], rounds: Sequence[int]):
        self._group, self._snapshots, self._rounds = group, snapshots, rounds

    def next_due(self, done: int) -> int | None:
        return min((number for number in self._rounds if number > done), default=None)

    def take(self, turn: Turn) -> None:
        if not turn.is_last and turn.done not in self._rounds:
            return
        name = "validation" if "validation" in self._snapshots and not turn.is_last else "test"
        for run, state in zip(self._group.runs, self._group.split(turn.state)):
            taken = self._snapshots[name](state.model, *self._images(run, name))
            of_test = run.experiment.dataset.domains[1:] if name == "test" else ()
            if run.folder is not None:
                more = {"domains": of_test[0]} if of_test else {}
                save_snapshot(run.folder.path / SNAPSHOTS, turn.done, name, jax.device_get(taken) | more)

    def _images(self, run: Run, name: str) -> tuple[Any, ...]:
        """A set's images and labels. Each run has its own validation images; all share the test set."""
        if name == "test":
            return self._group.data.test_inputs, self._group.data.test_labels
        dataset, rows = run.experiment.dataset, run.experiment.partition.validation_index
        return dataset.x_train[rows], dataset.y_train[rows].astype(np.int32)


class TestClients(Listener):
    """Measures accuracy on each client's own test images: every `eval_clients_every` rounds, and at the end.

    It adds the figures of such a round to the round's line, so it comes before `WriteRecords`. Those of the end are
    also in a file and in the summary, whichever round ends the run.
    """

    def __init__(
        self,
        machine: Machine,
        group: RunsTogether,
        program: Callable[..., dict[str, jax.Array]],
        memories: Sequence[ClientMemory | None],
    ):
        self._machine, self._group, self._program, self._memories = machine, group, program, memories
        first = group.runs[0].experiment
        self._at_once, self._width = clients_at_once(first), first.test_width
        self._every = first.problem.config.eval_clients_every

    def next_due(self, done: int) -> int | None:
        return done + self._every - done % self._every if self._every else None

    def take(self, turn: Turn) -> None:
        is_due = bool(self._every and turn.lines[0]) and turn.done % self._every == 0
        if not is_due and not turn.is_last:
            return
        for place, (run, state) in enumerate(zip(self._group.runs, self._group.split(turn.state))):
            sizes = np.array([len(rows) for rows in run.experiment.partition.client_test_rows])
            with doing("testing on the clients' own images"):
                accuracies = self._accuracies(place, state, sizes)
            if is_due:
                figures = test_figures(accuracies)
                turn.lines[place][-1].update({name: value for name, value in figures.items() if value is not None})
            if run.folder is not None:
                save_client_tests(run.folder.path, turn.done, sizes, accuracies)

    def _accuracies(self, place: int, state: State, sizes: np.ndarray) -> dict[str, np.ndarray]:
        """Name of a model -> its accuracy on each client's own test images, float [K]."""
        tested = np.flatnonzero(sizes)
        found: dict[str, np.ndarray] = {}
        for start in range(0, len(tested), self._at_once):
            clients = tested[start : start + self._at_once].astype(np.int32)
            for model, right in self._right(place, state, clients).items():
                of_all = found.setdefault(model, np.full(len(sizes), np.nan))
                of_all[clients] = np.asarray(right)[: len(clients)] / sizes[clients]
        return found

    def _right(self, place: int, state: State, clients: np.ndarray) -> dict[str, jax.Array]:
        """The number of correct images of some clients, see `make_client_tests`."""
        experiment, memory, put = self._group.runs[place].experiment, self._memories[place], self._machine.put
        data = self._group.data
        if len(self._group.runs) > 1:
            data = of_seed(data, place)
        if experiment.views is not None:
            data = put(experiment.views.of(clients, experiment.views.widths[-1])[0])
        if memory is not None:
            state, data = memory.join(state, clients, data)
        missing = self._at_once - len(clients)
        padded = np.pad(clients, (0, missing), mode="edge")
        present = np.arange(self._at_once) < len(clients)
        return self._program(state, data, *put((padded, present, *test_set_of(experiment, padded, self._width))))


class HearSignals(Listener):
    """Finds out whether this host, or any of several, has received a signal; comes before those that act on one.

    A later signal waits for the next turn.
    """

    def __init__(self, signals: Signals):
        self._signals = signals

    def take(self, turn: Turn) -> None:
        self._signals.agreed = hosts.any_signal(self._signals.received)


class KeepBest(Listener):
    """Keeps the model of the best round on validation images, if there are any; `save` writes it.

    It is written with the next checkpoint, which implies that the best model until then is on disk.
    """

    def __init__(self, group: RunsTogether, kept: list[Checkpoints]):
        self._group, self._kept = group, kept
        self._best = [self._of(run.folder.read(METRICS))[0] for run in group.runs if run.folder is not None]
        self._waiting: dict[int, tuple[int, Model]] = {}  # place of a run -> round and model, not written yet

    def take(self, turn: Turn) -> None:
        for place, lines in enumerate(turn.lines):
            accuracy, number = self._of(lines)
            if turn.best is not None and accuracy > self._best[place]:
                self._best[place] = accuracy
                self._waiting[place] = number, self._group.split(turn.best)[place]

    def save(self) -> None:
        """Writes the best models that are not on disk yet."""
        for place, (number, model) in self._waiting.items():
            self._kept[place].save(number, State(None, jax.device_get(model)))
        self._waiting.clear()

    @staticmethod
    def _of(lines: list[dict[str, Any]]) -> tuple[float, int]:
        """The best validation accuracy in records, and the first round with it; -1 without any."""
        found = [
            (line[VALIDATION_ACCURACY], -line["round"]) for line in lines if line.get(VALIDATION_ACCURACY) is not None
        ]
        accuracy, number = max(found, default=(-1.0, 0))
        return accuracy, -number


class SaveCheckpoints(Listener):
    """Saves the whole state: at a fixed interval, at the end, and after a signal."""

    def __init__(
        self,
        group: RunsTogether,
        checkpoints: list[Checkpoints],
        memories: Sequence[ClientMemory | None],
        every: int,
        signals: Signals,
        best: KeepBest,
    ):
        self._group, self._checkpoints, self._every, self._signals = group, checkpoints, every, signals
        self._best = best
        self._saved, self._memories = group.runs[0].round, memories

    def next_due(self, done: int) -> int | None:
        return done + self._every - done % self._every

    def take(self, turn: Turn) -> None:
        wanted = turn.is_last or turn.done % self._every == 0 or self._signals.agreed
        if not wanted or turn.done == self._saved:
            return
        before = time.monotonic()
        for run in self._group.runs:
            run.folder.sync()
        self._best.save()
        states = self._group.split(jax.device_get(turn.state))
        for run, checkpoints, memory, state in zip(self._group.runs, self._checkpoints, self._memories, states):
            if memory is not None:  # first, because a checkpoint implies that its round's memory is on disk
                memory.commit(turn.done, checkpoints.rounds())
            checkpoints.save(turn.done, state, run.folder.checksum(turn.done))
        seconds = (time.monotonic() - before) / len(self._checkpoints)
        for run in self._group.runs:
            run.folder.append(TIMINGS, [{"round": turn.done, "checkpoint_seconds": seconds}])
        self._saved = turn.done
        say(f"checkpoint of round {turn.done} in {seconds:.2f} s", VERBOSE)


class StopOnSignal(Listener):
    """Ends training after a signal. It is the last listener, so that the state is already saved."""

    def __init__(self, signals: Signals):
        self._signals = signals

    def take(self, turn: Turn) -> None:
        if turn.is_last:  # a signal after `HearSignals` would have no later turn
            self._signals.agreed = hosts.any_signal(self._signals.received)
        self._signals.act()
