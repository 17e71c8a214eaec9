"""The loop over rounds: a dispatch (one or several rounds), then each listener's turn, until the runs are over."""

import functools
import time
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data.federated import FederatedData, stack_seeds
from fedjax_ssl.engine.interface import State
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import row
from fedjax_ssl.records.workdir import Workdir
from fedjax_ssl.run import hosts
from fedjax_ssl.run.experiment import Experiment
from fedjax_ssl.run.feed import Feed
from fedjax_ssl.run.machine import Machine
from fedjax_ssl.run.observe.summary import to_record, to_timing
from fedjax_ssl.run.privacy import Accountant
from fedjax_ssl.run.programs import DISPATCH_CAPACITY
from fedjax_ssl.run.stopping import Stop
from fedjax_ssl.run.warm_start import WarmStart
from fedjax_ssl.run.wire import Traffic

DISPATCH_SECONDS = 1.0  # target duration of a dispatch, during which progress is not shown and signals wait


class Run(NamedTuple):
    """One seed's run: an experiment in its folder, and where it starts."""

    experiment: Experiment  # what is trained
    folder: Workdir | None  # its workdir; None on a host that writes nothing
    state: State | None  # of its newest checkpoint; None: the run begins
    warm_start: WarmStart | None = None  # another run's model to begin with, if any
    ended: str = ""  # why no rounds are left, see `fedjax_ssl.records.ending`; '' if there are some

    @property
    def round(self) -> int:
        """Number of rounds done before."""
        return 0 if self.state is None else int(self.state.round)

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.experiment.problem.config.seed


class RunsTogether(NamedTuple):
    """Runs that train in one program, from the same round: a single run, or runs of several seeds or settings.

    The trees of several runs are stacked; those of a single run are unchanged.
    """

    runs: list[Run]  # one for each seed or setting
    data: FederatedData  # of all runs, on all devices
    hidden_labels: jax.Array  # int32 [N], the same for every seed, on all devices

    def join(self, trees: list[Any]) -> Any:
        """Joins the runs' trees into the group's tree."""
        return trees[0] if len(self.runs) == 1 else jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)

    def split(self, tree: Any) -> list[Any]:
        """Splits the group's tree into the runs' trees."""
        return [tree] if len(self.runs) == 1 else [row(tree, number) for number in range(len(self.runs))]


def make_group(machine: Machine, runs: list[Run]) -> RunsTogether:
    """Groups runs; their data are on all devices, stacked if there are several seeds."""
    first = runs[0].experiment
    data = first.data if len(runs) == 1 else stack_seeds([run.experiment.data for run in runs])
    return RunsTogether(runs, *machine.share((data, first.hidden_labels)))


class Turn(NamedTuple):
    """What listeners get after a dispatch, and once before the first one; lists have an entry for each run."""

    done: int  # rounds done
    is_last: bool  # whether the runs are over
    state: State  # the group's, after that round; no listener may keep it, as the next dispatch reuses its memory
    # New lines of metrics.jsonl, one for each round of the dispatch; none before the first dispatch.
    lines: list[list[dict[str, Any]]]
    timings: list[list[dict[str, Any]]]  # the same for timings.jsonl
    healthy: list[bool]  # whether the state after the last round can be trained further
    best: Model | None = None  # the group's, of the dispatch's best round on validation images; None without these


class Listener(Protocol):
    """A part of the run that acts between dispatches."""

    def next_due(self, done: int) -> int | None:
        """The next round beyond `done` that must end a dispatch, so that the listener has a turn; None: any round."""
        del done
        return None

    def take(self, turn: Turn) -> None:
        """Acts on a turn. May end training by raising an exception."""


def run_rounds(
    machine: Machine, feed: Feed, group: RunsTogether, states: list[State], traffic: Traffic, listeners: list[Listener]
) -> list[State]:
    """Trains a group of runs to the end; returns their last states.

    The buffers of the states at the start are donated. The listeners are in the order of their turns.
    """
    experiment, num_runs = group.runs[0].experiment, len(group.runs)
    config, done = experiment.problem.config, group.runs[0].round
    configs = [run.experiment.problem.config for run in group.runs]
    accountants = [Accountant(config) if config.privacy.noise else None for config in configs]
    stop = Stop(config, group.runs[0].folder, None if experiment.method.wire_bytes else traffic.most)
    state, rounds = machine.put(group.join(states)), 1  # the first dispatch measures how long a round takes
    none: list[list[Any]] = [[]] * num_runs
    turn = Turn(done, done >= config.num_rounds, state, none, none, [True] * num_runs)
    for listener in listeners:
        listener.take(turn)
    while not turn.is_last:
        due = [stop.next_due(done), *(listener.next_due(done) for listener in listeners)]
        limits = [number - done for number in (*due, config.num_rounds) if number is not None]
        # The first host's clock and listeners decide.
        rounds = hosts.from_first(functools.partial(min, rounds, feed.most_rounds, *limits))
        before = time.monotonic()
        result = feed.dispatch(state, done, rounds)
        state, on_host, ran = result.state, jax.device_get(result.results), int(result.rounds_done)
        seconds = (time.monotonic() - before) / ran

        by_run = list(zip(*(group.split(row(on_host, index)) for index in range(ran))))  # each run's RoundResults
        lines = [
            [to_record(each.measured(), traffic, accountant) for each in results]
            for results, accountant in zip(by_run, accountants)
        ]
        timings = [[to_timing(each, seconds, num_runs) for each in results] for results in by_run]
        healthy = [bool(results[-1].healthy) for results in by_run]
        done += ran
        is_last = bool(stop.after(lines)) or done >= config.num_rounds
        turn = Turn(done, is_last, state, lines, timings, healthy, result.best and result.best.model)
        for listener in listeners:
            listener.take(turn)
        rounds = config.rounds_per_dispatch or int(np.clip(DISPATCH_SECONDS / seconds, 1, DISPATCH_CAPACITY))
    return group.split(state)
