"""The loop over rounds: dispatches, and what has its turn between them."""

import contextlib
import json
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_ssl.data.federated import stack_seeds
from fedjax_ssl.data.partition import class_counts, save_partition
from fedjax_ssl.data.sources import dataset_facts
from fedjax_ssl.engine.interface import State
from fedjax_ssl.engine.round import RoundResult
from fedjax_ssl.errors import TrainingError
from fedjax_ssl.files import replace_arrays, replace_file
from fedjax_ssl.learning.trees import row
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.snapshots import save_snapshot
from fedjax_ssl.records.workdir import (
    CHECKPOINTS,
    CLASS_COUNTS,
    DATASET,
    METRICS,
    PARTITION,
    SNAPSHOTS,
    TIMINGS,
    Workdir,
)
from fedjax_ssl.run.experiment import Experiment
from fedjax_ssl.run.machine import Machine
from fedjax_ssl.run.programs import DISPATCH_CAPACITY, Program
from fedjax_ssl.run.progress import RoundProgress, title_of
from fedjax_ssl.run.signals import Signals
from fedjax_ssl.run.summary import to_record, what_went_wrong
from fedjax_ssl.run.trackers import Trackers, open_trackers
from fedjax_ssl.run.wire import bytes_per_client

DISPATCH_SECONDS = 1.0  # aimed at: how long a progress bar stands still and a signal waits


class Run(NamedTuple):
    """One seed's run: an experiment in its folder, and where it stands.

    Attributes:
        experiment: what is trained.
        folder: its workdir.
        state: of its newest checkpoint, None for a run that begins.
        trackers: what shows the rounds while they go on; None before training.
    """

    experiment: Experiment
    folder: Workdir
    state: State | None
    trackers: Trackers | None = None

    @property
    def round(self) -> int:
        """Rounds done."""
        return 0 if self.state is None else int(self.state.round)


def has_ended(experiment: Experiment, state: State, done: int) -> bool:
    """Whether a state, after so many rounds, is the last one: of the configuration, or by the method's own word."""
    converged = experiment.method.converged
    return done >= experiment.problem.config.num_rounds or (converged is not None and bool(converged(state)))


def _train_group(machine: Machine, config: ConfigDict, group: list[Run], program: Program, sharing: int) -> list[State]:
    """Runs that go through the lanes together, from where they stand to the end; their states.

    `sharing` is the number of all runs that the program was compiled for: each bears its part of the seconds.
    """
    first_round = group[0].round
    for run in group:
        run.folder.begin(first_round)
        run.folder.append(TIMINGS, [{"round": first_round, "compile_seconds": program.seconds / sharing}])
        _write_facts(run)
    with contextlib.ExitStack() as stack:
        group = [run._replace(trackers=stack.enter_context(open_trackers(config, run.folder))) for run in group]
        checkpoints = [
            stack.enter_context(contextlib.closing(Checkpoints(run.folder.path / CHECKPOINTS))) for run in group
        ]
        title = title_of(config.seeds, [run.folder.config["seed"] for run in group])
        progress = stack.enter_context(RoundProgress(config.num_rounds, first_round, title))
        signals = stack.enter_context(Signals())
        for run in group:
            progress.say(f"workdir {run.folder.path}" + (f", from round {first_round}" if first_round else ""))
        states = []
        for run, own_checkpoints in zip(group, checkpoints):
            states.append(run.state)
            if run.state is None:
                before = time.monotonic()
                states[-1] = jax.block_until_ready(program.init(machine.put(run.experiment.data)))
                run.folder.append(TIMINGS, [{"round": 0, "init_seconds": time.monotonic() - before}])
                own_checkpoints.save(0, jax.device_get(states[-1]))
        return _run_rounds(machine, config, group, states, program, checkpoints, progress, signals)


def _write_facts(run: Run) -> None:
    """What does not change while a run goes on: who holds what, and what the images are."""
    folder, experiment = run.folder.path, run.experiment
    if not (folder / PARTITION).exists():
        save_partition(folder / PARTITION, experiment.partition)
    dataset = experiment.dataset
    counts = class_counts(dataset.y_train, experiment.partition, dataset.num_classes)
    replace_arrays(folder / CLASS_COUNTS, **counts)
    replace_file(folder / DATASET, json.dumps(dataset_facts(dataset), indent=2) + "\n")


def _run_rounds(
    machine: Machine,
    config: ConfigDict,
    group: list[Run],
    states: list[State],
    program: Program,
    checkpoints: list[Checkpoints],
    progress: RoundProgress,
    signals: Signals,
) -> list[State]:
    """Dispatches rounds until all are done; between dispatches the metrics, checkpoints and signals have their turn."""
    experiment, alone = group[0].experiment, len(group) == 1
    traffic = bytes_per_client(experiment.problem, experiment.method, states[0], experiment.data)
    done, num_rounds = group[0].round, config.num_rounds
    # One run's arrays go in as they are, those of several stacked.
    state = states[0] if alone else jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    data = experiment.data if alone else stack_seeds([run.experiment.data for run in group])
    state, data, hidden_labels = machine.put((state, data, experiment.hidden_labels))
    of_run = (lambda tree, _: tree) if alone else row
    rounds = 1  # the first dispatch tells how long a round takes
    checkpoint_every = config.checkpoint_every_persistent if config.client.persistent else config.checkpoint_every

    def take_snapshots() -> None:
        for number, run in enumerate(group):
            own = of_run(state, number)
            taken = program.snapshot(own.params, own.batch_stats, data.test_images, data.test_labels)
            save_snapshot(run.folder.path / SNAPSHOTS, done, jax.device_get(taken))

    if done in config.snapshot_rounds:
        take_snapshots()
    signals.act()
    while not has_ended(experiment, state, done):
        to_checkpoint = checkpoint_every - done % checkpoint_every
        to_snapshot = min((number - done for number in config.snapshot_rounds if number > done), default=rounds)
        rounds = min(rounds, num_rounds - done, to_checkpoint, to_snapshot)
        before = time.monotonic()
        result = program.dispatch(state, data, hidden_labels, machine.put(jnp.int32(rounds)))
        state, results = result.state, jax.device_get(result.results)
        ran = int(result.rounds_done)
        seconds = (time.monotonic() - before) / ran

        failures = []
        for number, run in enumerate(group):
            own = [of_run(row(results, index), number) for index in range(ran)]
            failures += _write_rounds(run, own, traffic, seconds / len(group), progress if number == 0 else None)
        if failures:
            raise TrainingError("; ".join(failures))
        done += ran
        ended = has_ended(experiment, state, done)
        if ended or done in config.snapshot_rounds:
            take_snapshots()
        if ended or done % checkpoint_every == 0 or signals.received:
            before = time.monotonic()
            on_host = jax.device_get(state)
            for number, own_checkpoints in enumerate(checkpoints):
                own_checkpoints.save(done, of_run(on_host, number))
            for run in group:
                spent = (time.monotonic() - before) / len(group)
                run.folder.append(TIMINGS, [{"round": done, "checkpoint_seconds": spent}])
        signals.act()
        rounds = config.rounds_per_dispatch or int(np.clip(DISPATCH_SECONDS / seconds, 1, DISPATCH_CAPACITY))
    return [of_run(state, number) for number in range(len(group))]


def _write_rounds(
    run: Run,
    rounds: list[RoundResult],
    traffic: dict[str, int],
    seconds: float,
    progress: RoundProgress | None,
) -> list[str]:
    """Writes one run's rounds down; returns why it cannot go on, or nothing."""
    config = run.experiment.problem.config
    # Lane steps depend on the machine, as seconds do.
    lines = [to_record(result.metrics, traffic, config) for result in rounds]
    timings = [
        {"round": line["round"], "seconds": seconds, "lane_steps": result.lane_steps.item()}
        for line, result in zip(lines, rounds)
    ]
    run.folder.append(METRICS, lines)
    run.folder.append(TIMINGS, timings)
    run.trackers.write(lines, timings)
    if progress is not None:
        progress.update(lines[-1])
    return [] if rounds[-1].healthy else [f"seed {config.seed}, {what_went_wrong(lines[-1])}"]
