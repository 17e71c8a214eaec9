"""The listeners of a run, in the order of their turns: records are written before the checkpoint that needs them."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_ssl.errors import TrainingError
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.snapshots import save_best, save_snapshot
from fedjax_ssl.records.workdir import METRICS, SNAPSHOTS, TIMINGS
from fedjax_ssl.run import hosts
from fedjax_ssl.run.feed import ClientMemory
from fedjax_ssl.run.loop import Listener, Run, RunsTogether, Turn
from fedjax_ssl.run.observe.log import VERBOSE, say
from fedjax_ssl.run.observe.progress import RoundProgress
from fedjax_ssl.run.observe.summary import what_went_wrong
from fedjax_ssl.run.observe.trackers import Trackers
from fedjax_ssl.run.signals import Signals


class WriteRecords(Listener):
    """Each round's lines in metrics.jsonl and timings.jsonl."""

    def __init__(self, runs: list[Run]):
        self._runs = runs

    def take(self, turn: Turn) -> None:
        for run, lines, timings in zip(self._runs, turn.lines, turn.timings):
            run.folder.append(METRICS, lines)
            run.folder.append(TIMINGS, timings)


class FeedTrackers(Listener):
    """Each round's figures for TensorBoard and Weights & Biases."""

    def __init__(self, trackers: list[Trackers]):
        self._trackers = trackers

    def take(self, turn: Turn) -> None:
        for trackers, lines, timings in zip(self._trackers, turn.lines, turn.timings):
            trackers.write(lines, timings)


class ShowProgress(Listener):
    """The latest round's figures on the terminal, those of the first run."""

    def __init__(self, progress: RoundProgress):
        self._progress = progress

    def take(self, turn: Turn) -> None:
        if turn.lines[0]:
            self._progress.update(turn.lines[0][-1])
        else:
            self._progress.begin()


class StopOnFailure(Listener):
    """Ends the training if a round left no usable state: after its line is written, before the state is saved."""

    def __init__(self, runs: list[Run]):
        self._seeds = [run.experiment.problem.config.seed for run in runs]

    def take(self, turn: Turn) -> None:
        """See `Listener`.

        Raises:
            TrainingError: with the seeds, the round and its losses.
        """
        of_runs = zip(self._seeds, turn.healthy, turn.lines)
        failures = [f"seed {seed}, {what_went_wrong(lines[-1])}" for seed, healthy, lines in of_runs if not healthy]
        if failures:
            raise TrainingError("; ".join(failures))


class SaveSnapshots(Listener):
    """The model's outputs on a set of images, after the configured rounds and the last one.

    The set is the test set, or before the last round the validation images if there are any.
    """

    def __init__(self, group: RunsTogether, snapshots: Mapping[str, Callable[..., Any]], rounds: Sequence[int]):
        """Computes nothing yet.

        Args:
            group: whose models.
            snapshots: see `Program`.
            rounds: after which one is taken; 0 is before the first.
        """
        self._group, self._snapshots, self._rounds = group, snapshots, rounds

    def next_due(self, done: int) -> int | None:
        return min((number for number in self._rounds if number > done), default=None)

    def take(self, turn: Turn) -> None:
        if not turn.is_last and turn.done not in self._rounds:
            return
        name = "validation" if "validation" in self._snapshots and not turn.is_last else "test"
        for run, state in zip(self._group.runs, self._group.split(turn.state)):
            taken = self._snapshots[name](state.model, *self._images(run, name))
            if run.folder is not None:
                save_snapshot(run.folder.path / SNAPSHOTS, turn.done, name, jax.device_get(taken))

    def _images(self, run: Run, name: str) -> tuple[Any, ...]:
        """A set's images and labels; the validation images are a run's, those of the test set the same for all."""
        if name == "test":
            return self._group.data.test_inputs, self._group.data.test_labels
        dataset, rows = run.experiment.dataset, run.experiment.partition.validation_index
        return dataset.x_train[rows], dataset.y_train[rows].astype(np.int32)


class SaveBest(Listener):
    """What the best model so far, by the validation images, predicts on the test set.

    Every dispatch ends after one round, for the model of a round inside of it is not to be had.
    """

    def __init__(self, group: RunsTogether, snapshot: Callable[..., Any]):
        """Computes nothing yet.

        Args:
            group: whose models; each round is measured on validation images.
            snapshot: of the test set, see `Program`.
        """
        self._group, self._snapshot = group, snapshot
        self._best: list[float] | None = None

    def next_due(self, done: int) -> int | None:
        return done + 1

    def take(self, turn: Turn) -> None:
        if self._best is None:  # of the rounds before this start
            runs = self._group.runs
            self._best = hosts.from_first(lambda: [_best_of(run.folder.read(METRICS)) for run in runs])
        better = [_best_of(lines[-1:]) > best for lines, best in zip(turn.lines, self._best)]
        if not any(better):
            return
        models, data = self._group.split(turn.state.model), self._group.data
        for place, run in enumerate(self._group.runs):
            if better[place]:
                self._best[place] = _best_of(turn.lines[place][-1:])
                taken = self._snapshot(models[place], data.test_inputs, data.test_labels)
                if run.folder is not None:
                    save_best(run.folder.path / SNAPSHOTS, turn.done, jax.device_get(taken))


def _best_of(lines: list[dict[str, Any]]) -> float:
    """The best validation accuracy of some rounds; without any less than every other."""
    return max((line["validation_accuracy"] for line in lines), default=-1.0)


class HearSignals(Listener):
    """Whether one of several hosts has received a signal; before the listeners that act on one.

    A signal that comes after it waits for the next turn.
    """

    def __init__(self, signals: Signals):
        self._signals = signals

    def take(self, turn: Turn) -> None:
        self._signals.agreed = hosts.any_signal(self._signals.received)


class SaveCheckpoints(Listener):
    """The whole state: every so many rounds, at the end, and after a signal."""

    def __init__(
        self,
        group: RunsTogether,
        checkpoints: list[Checkpoints],
        memories: Sequence[ClientMemory | None],
        every: int,
        signals: Signals,
    ):
        """Writes nothing yet.

        Args:
            group: whose states.
            checkpoints: of each run, which have one of the round that the runs start from.
            memories: of each run's clients, where it lies outside of its state.
            every: so many rounds.
            signals: that end the training.
        """
        self._group, self._checkpoints, self._every, self._signals = group, checkpoints, every, signals
        self._saved, self._memories = group.runs[0].round, memories

    def next_due(self, done: int) -> int | None:
        return done + self._every - done % self._every

    def take(self, turn: Turn) -> None:
        wanted = turn.is_last or turn.done % self._every == 0 or self._signals.waiting
        if not wanted or turn.done == self._saved:
            return
        before = time.monotonic()
        for run in self._group.runs:
            run.folder.sync()
        states = self._group.split(jax.device_get(turn.state))
        for run, checkpoints, memory, state in zip(self._group.runs, self._checkpoints, self._memories, states):
            if memory is not None:  # first: a checkpoint says that the memory of its round is on the disk
                memory.commit(turn.done, checkpoints.rounds())
            checkpoints.save(turn.done, state, run.folder.checksum(turn.done))
        seconds = (time.monotonic() - before) / len(self._checkpoints)
        for run in self._group.runs:
            run.folder.append(TIMINGS, [{"round": turn.done, "checkpoint_seconds": seconds}])
        self._saved = turn.done
        say(f"checkpoint of round {turn.done} in {seconds:.2f} s", VERBOSE)


class StopOnSignal(Listener):
    """Ends the training after a signal; the last listener, when the state is saved."""

    def __init__(self, signals: Signals):
        self._signals = signals

    def take(self, turn: Turn) -> None:
        """See `Listener`.

        Raises:
            KeyboardInterrupt, SystemExit: after SIGINT; after SIGTERM or SIGHUP.
        """
        if turn.is_last:  # what has come since `HearSignals` has no next turn to wait for
            self._signals.agreed = hosts.any_signal(self._signals.received)
        self._signals.act()
