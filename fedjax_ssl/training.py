"""A run from its configuration to its trained model: `train(config, workdir)`."""

import contextlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_ssl.backend import on_all_devices, seeds_together, use_compilation_cache, use_devices
from fedjax_ssl.checkpoints import Checkpoints
from fedjax_ssl.config import for_seed, validate
from fedjax_ssl.data import class_counts, dataset_facts, save_partition, stack_seeds
from fedjax_ssl.errors import TrainingError
from fedjax_ssl.experiment import Experiment, build_experiments
from fedjax_ssl.files import replace_arrays, replace_file
from fedjax_ssl.lanes import row
from fedjax_ssl.live import Live, open_live
from fedjax_ssl.method import State
from fedjax_ssl.programs import DISPATCH_CAPACITY, Program, compile_program
from fedjax_ssl.progress import RoundProgress, title_of
from fedjax_ssl.records import bytes_per_client, summarise, to_record, what_went_wrong
from fedjax_ssl.signals import Signals
from fedjax_ssl.snapshots import save_snapshot
from fedjax_ssl.workdir import (
    CHECKPOINTS,
    CLASS_COUNTS,
    DATASET,
    METRICS,
    PARTITION,
    SNAPSHOTS,
    TIMINGS,
    Workdir,
    fresh_workdir,
)

DISPATCH_SECONDS = 1.0  # aimed at: how long a progress bar stands still and a signal waits


class Run(NamedTuple):
    """One seed's run: an experiment in its folder, and where it stands.

    Attributes:
        experiment: what is trained.
        folder: its workdir.
        state: of its newest checkpoint, None for a run that begins.
        live: what shows the rounds while they go on; None before training.
    """

    experiment: Experiment
    folder: Workdir
    state: State | None
    live: Live | None = None

    @property
    def round(self) -> int:
        """Rounds done."""
        return 0 if self.state is None else int(self.state.round)


def train(
    config: ConfigDict, workdir: str | os.PathLike | None = None, when_over: Callable[[], object] = lambda: None
) -> State | tuple[State, ...]:
    """Trains what a configuration describes, or takes the run in `workdir` up where it was left.

    Args:
        config: see `fedjax_ssl.config.base_config`.
        workdir: the run's folder; by default a fresh one under runs/. It gets config.json, partition.npz,
            metrics.jsonl (a line a round, the same whatever the clock says), timings.jsonl, summary.json and
            checkpoints/. With `config.seeds` each seed's run lies in a folder seed_N of its own in there, as if it
            had been trained alone.
        when_over: is called whenever a run is over and has its summary: with `config.seeds` once for each of them.

    Returns:
        The state after the last round; with `config.seeds` one for each of them.

    Raises:
        UserError: the configuration, the data or the folder is not usable; nothing has been written.
        TrainingError: the global state is no longer finite, or every upload of a round was dropped.
        KeyboardInterrupt, SystemExit: after SIGINT or SIGTERM, with a checkpoint written.
    """
    validate(config)
    use_compilation_cache()
    with use_devices(config.devices), contextlib.ExitStack() as open_folders:
        # Meet whatever is wrong before anything is written.
        runs = open_runs(config, workdir, open_folders)
        groups = group_runs([run for run in runs if not is_over(run)])
        if groups:
            print("compiling (a later start takes it from the cache)", file=sys.stderr, flush=True)
        some_begin = any(run.state is None for run in runs)
        programs = {
            size: compile_program(config, [run.experiment for run in group], some_begin)
            for size, group in {len(group): group for group in groups}.items()
        }
        if workdir is None and config.seeds:
            parent = fresh_workdir(pathlib.Path("runs"), config.method)
            for run in runs:
                run.folder.path = parent / f"seed_{run.folder.config['seed']}"

        states = {run.folder.config["seed"]: run.state for run in runs}
        for run in filter(is_over, runs):
            _conclude(run)  # it may have been killed before its summary
            when_over()
        for group in groups:
            sharing = sum(len(other) for other in groups if len(other) == len(group))
            trained = _train_group(config, group, programs[len(group)], sharing)
            states.update(zip([run.folder.config["seed"] for run in group], trained))
            for run in group:
                _conclude(run)
                when_over()
    return tuple(states[seed] for seed in config.seeds) if config.seeds else states[config.seed]


def open_runs(config: ConfigDict, workdir: str | os.PathLike | None, open_folders: contextlib.ExitStack) -> list[Run]:
    """The runs that a configuration asks for, one for each seed, with the states of those that were begun before.

    Args:
        config: of all the seeds.
        workdir: see `train`.
        open_folders: closes the runs' folders.

    Raises:
        UserError: a folder, the data or a field is not usable.
    """
    configs = [for_seed(config, seed) for seed in config.seeds or (config.seed,)]
    apart = workdir is not None and config.seeds
    paths = [pathlib.Path(workdir) / f"seed_{c.seed}" if apart else workdir for c in configs]
    folders = [
        open_folders.enter_context(contextlib.closing(Workdir(path, c.to_dict()))) for path, c in zip(paths, configs)
    ]
    partition_files = [folder.path / PARTITION if folder.is_begun else None for folder in folders]
    experiments = build_experiments(configs, partition_files)
    return [Run(e, folder, restore_newest(folder, e.state_shape)) for e, folder in zip(experiments, folders)]


def restore_newest(folder: Workdir, like: State) -> State | None:
    """The state of a run's newest checkpoint; None for a run that has none yet."""
    if not folder.is_begun:
        return None
    with contextlib.closing(Checkpoints(folder.path / CHECKPOINTS)) as checkpoints:
        return None if checkpoints.latest_round() is None else checkpoints.restore(like)


def is_over(run: Run) -> bool:
    """Whether a run has nothing left to do."""
    return run.state is not None and has_ended(run.experiment, run.state, run.round)


def has_ended(experiment: Experiment, state: State, done: int) -> bool:
    """Whether a state, after so many rounds, is the last one: of the configuration, or by the method's own word."""
    converged = experiment.method.converged
    return done >= experiment.problem.config.num_rounds or (converged is not None and bool(converged(state)))


def group_runs(runs: list[Run]) -> list[list[Run]]:
    """Which runs go through the lanes together: those at the same round, as far as the backend gains by it."""
    # Each seed has an end of its own where the method says when a run is over.
    if not runs:
        return []
    together = 1 if runs[0].experiment.method.converged else seeds_together(len(runs))
    groups = []
    for run in runs:
        if not groups or len(groups[-1]) == together or groups[-1][-1].round != run.round:
            groups.append([])
        groups[-1].append(run)
    return groups


def _train_group(config: ConfigDict, group: list[Run], program: Program, sharing: int) -> list[State]:
    """Runs that go through the lanes together, from where they stand to the end; their states.

    `sharing` is the number of all runs that the program was compiled for: each bears its part of the seconds.
    """
    first_round = group[0].round
    for run in group:
        run.folder.begin(first_round)
        run.folder.append(TIMINGS, [{"round": first_round, "compile_seconds": program.seconds / sharing}])
        _write_facts(run)
    with contextlib.ExitStack() as stack:
        group = [run._replace(live=stack.enter_context(open_live(config, run.folder))) for run in group]
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
                states[-1] = jax.block_until_ready(program.init(on_all_devices(run.experiment.data)))
                run.folder.append(TIMINGS, [{"round": 0, "init_seconds": time.monotonic() - before}])
                own_checkpoints.save(0, jax.device_get(states[-1]))
        return _run_rounds(config, group, states, program, checkpoints, progress, signals)


def _conclude(run: Run) -> None:
    """Writes what a finished run ends with, unless it is there. A report that fails takes nothing away from the run."""
    config = run.experiment.problem.config
    if not run.folder.is_summarised():
        run.folder.write_summary(summarise(config, run.folder))
    if not config.log.report or run.folder.is_reported():
        return
    from fedjax_ssl.report import write_report  # matplotlib takes a second to import

    try:
        print(f"report {write_report(run.folder.path)}", file=sys.stderr)
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"the run is complete, but its report failed: {why}", file=sys.stderr)


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
    state, data, hidden_labels = on_all_devices((state, data, experiment.hidden_labels))
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
        result = program.dispatch(state, data, hidden_labels, on_all_devices(jnp.int32(rounds)))
        state, metrics = result.state, jax.device_get(result.metrics)
        ran = int(result.rounds_done)
        seconds = (time.monotonic() - before) / ran

        failures = []
        for number, run in enumerate(group):
            own = [of_run(row(metrics, index), number) for index in range(ran)]
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
    rounds: list[dict[str, np.ndarray]],
    traffic: dict[str, int],
    seconds: float,
    progress: RoundProgress | None,
) -> list[str]:
    """Writes one run's rounds down; returns why it cannot go on, or nothing."""
    config = run.experiment.problem.config
    # Lane steps depend on the machine, as seconds do.
    timings = [
        {"round": metrics["round"].item(), "seconds": seconds, "lane_steps": metrics.pop("lane_steps").item()}
        for metrics in rounds
    ]
    healthy = [metrics.pop("healthy").item() for metrics in rounds]
    lines = [to_record(metrics, traffic, config) for metrics in rounds]
    run.folder.append(METRICS, lines)
    run.folder.append(TIMINGS, timings)
    run.live.write(lines, timings)
    if progress is not None:
        progress.update(lines[-1])
    return [] if healthy[-1] else [f"seed {config.seed}, {what_went_wrong(lines[-1])}"]
