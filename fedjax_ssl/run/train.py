"""A run from its configuration to its trained model: `train(config, workdir)`."""

import contextlib
import os
import pathlib
import sys
from collections.abc import Callable

from ml_collections import ConfigDict

from fedjax_ssl.config import for_seed, validate
from fedjax_ssl.engine.interface import State
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.workdir import (
    CHECKPOINTS,
    PARTITION,
    Workdir,
    fresh_workdir,
)
from fedjax_ssl.run.experiment import build_experiments
from fedjax_ssl.run.loop import Run, _train_group, has_ended
from fedjax_ssl.run.machine import Machine, use_machine
from fedjax_ssl.run.programs import compile_program
from fedjax_ssl.run.summary import summarise


def train(
    config: ConfigDict, workdir: str | os.PathLike | None = None, on_finish: Callable[[], object] = lambda: None
) -> State | tuple[State, ...]:
    """Trains what a configuration describes, or takes the run in `workdir` up where it was left.

    Args:
        config: see `fedjax_ssl.config.base_config`.
        workdir: the run's folder; by default a fresh one under runs/. It gets config.json, partition.npz,
            metrics.jsonl (a line a round, the same whatever the clock says), timings.jsonl, summary.json and
            checkpoints/. With `config.seeds` each seed's run lies in a folder seed_N of its own in there, as if it
            had been trained alone.
        on_finish: is called whenever a run is over and has its summary: with `config.seeds` once for each of them.

    Returns:
        The state after the last round; with `config.seeds` one for each of them.

    Raises:
        UserError: the configuration, the data or the folder is not usable; nothing has been written.
        TrainingError: the global state is no longer finite, or every upload of a round was dropped.
        KeyboardInterrupt, SystemExit: after SIGINT or SIGTERM, with a checkpoint written.
    """
    validate(config)
    with use_machine(config) as machine, contextlib.ExitStack() as open_folders:
        # Meet whatever is wrong before anything is written.
        runs = open_runs(config, workdir, open_folders)
        groups = group_runs(machine, [run for run in runs if not is_over(run)])
        if groups:
            print("compiling (a later start takes it from the cache)", file=sys.stderr, flush=True)
        some_begin = any(run.state is None for run in runs)
        programs = {
            size: compile_program(machine, [run.experiment for run in group], some_begin)
            for size, group in {len(group): group for group in groups}.items()
        }
        if workdir is None and config.seeds:
            parent = fresh_workdir(pathlib.Path("runs"), config.method)
            for run in runs:
                run.folder.path = parent / f"seed_{run.folder.config['seed']}"

        states = {run.folder.config["seed"]: run.state for run in runs}
        for run in filter(is_over, runs):
            _conclude(run)  # it may have been killed before its summary
            on_finish()
        for group in groups:
            sharing = sum(len(other) for other in groups if len(other) == len(group))
            trained = _train_group(machine, config, group, programs[len(group)], sharing)
            states.update(zip([run.folder.config["seed"] for run in group], trained))
            for run in group:
                _conclude(run)
                on_finish()
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


def group_runs(machine: Machine, runs: list[Run]) -> list[list[Run]]:
    """Which runs go through the lanes together: those at the same round, as far as the backend gains by it."""
    # Each seed has an end of its own where the method says when a run is over.
    if not runs:
        return []
    together = 1 if runs[0].experiment.method.converged else machine.seeds_together(len(runs))
    groups = []
    for run in runs:
        if not groups or len(groups[-1]) == together or groups[-1][-1].round != run.round:
            groups.append([])
        groups[-1].append(run)
    return groups


def _conclude(run: Run) -> None:
    """Writes what a finished run ends with, unless it is there. A report that fails takes nothing away from the run."""
    config = run.experiment.problem.config
    if not run.folder.is_summarised():
        run.folder.write_summary(summarise(config, run.folder))
    if not config.log.report or run.folder.is_reported():
        return
    from fedjax_ssl.report import write_report

    try:
        print(f"report {write_report(run.folder.path)}", file=sys.stderr)
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"the run is complete, but its report failed: {why}", file=sys.stderr)
