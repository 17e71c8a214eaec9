"""The runs that a configuration asks for: their folders, their parts, and the states of those that resume."""

import contextlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.config import for_seed
from fedjax_ssl.engine.interface import State
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.client_rows import check_rows
from fedjax_ssl.records.ending import ROUNDS, spent
from fedjax_ssl.records.lines import METRICS, TIMINGS, read_rounds
from fedjax_ssl.records.manifest import trained_with
from fedjax_ssl.records.workdir import CHECKPOINTS, CLIENTS, PARTITION, SEEDS, Workdir, check_folder, refuse_others
from fedjax_ssl.run import hosts
from fedjax_ssl.run.about import about
from fedjax_ssl.run.client_memory import run_of
from fedjax_ssl.run.experiment import Experiment, build_experiments
from fedjax_ssl.run.loop import Run
from fedjax_ssl.run.observe.log import warn
from fedjax_ssl.run.privacy import secret_of
from fedjax_ssl.run.warm_start import share_warm_start


def open_runs(
    given: list[ConfigDict],
    workdirs: Sequence[str | os.PathLike[str] | None],
    open_folders: contextlib.ExitStack,
    root: str | os.PathLike[str] | None = None,
) -> list[Run]:
    """Opens the runs of configurations, one for each seed, with the states of those that resume.

    `open_folders` closes their folders. Raises a UserError if a folder, the data or a field cannot be used.
    """
    configs = [for_seed(config, seed) for config in given for seed in config.seeds or (config.seed,)]
    folders: list[Workdir | None] = [None] * len(configs)
    if hosts.is_first():
        paths: list[Any] = []
        for config, workdir in zip(given, workdirs):
            if workdir is not None and config.seeds:
                check_folder(workdir)
                refuse_others(pathlib.Path(workdir), SEEDS)
                paths += [pathlib.Path(workdir) / f"seed_{seed}" for seed in config.seeds]
            else:
                paths += [workdir] * len(config.seeds or (config.seed,))
        folders = [
            open_folders.enter_context(contextlib.closing(Workdir(path, c.to_dict())))
            for path, c in zip(paths, configs)
        ]
    are_resumed = [folder and folder.is_begun and Checkpoints(folder.path / CHECKPOINTS).rounds() for folder in folders]
    partition_files = [folder.path / PARTITION if resumed else None for folder, resumed in zip(folders, are_resumed)]
    secrets = hosts.from_first(
        lambda: [secret_of(c, folder.path if resumed else None).hex()
                 for c, folder, resumed in zip(configs, folders, are_resumed)]
    )  # fmt: skip
    experiments = build_experiments(configs, partition_files, [bytes.fromhex(secret) for secret in secrets])
    for folder, experiment in zip(folders, experiments):
        if folder is not None:
            c = experiment.problem.config
            folder.decide(c.to_dict(), about(c, experiment.dataset.tested_domains))
    # All arrays that a run trains on, wherever they are stored. The checksum may be shown, so the secret is left out.
    arrays = [
        (e.data._replace(secret=None), e.hidden_labels) if e.views is None else e.views.held._replace(secret=None)
        for e in experiments
    ]
    hosts.check_same("the data", lambda: f"checksum {hosts.checksum(arrays)}")
    states = _find_states(experiments, folders)
    ends = why_ended(experiments, folders, states)
    for experiment, folder, state, ended in zip(experiments, folders, states, ends):
        goes_on = folder is not None and state is not None and not ended
        if goes_on and jax.tree.leaves(experiment.state_shape.of_clients) and not jax.tree.leaves(state.of_clients):
            check_rows(folder.path / CLIENTS, run_of(experiment), int(state.round))  # its checkpoint has no memory
    # A resumed run has a checkpoint of its own and does not need the other run.
    starts = [share_warm_start(e, root) if state is None else None for e, state in zip(experiments, states)]
    return [Run(*parts) for parts in zip(experiments, folders, states, starts, ends)]


def _find_states(experiments: list[Experiment], folders: list[Workdir | None]) -> list[State | None]:
    """The states of the runs that resume, on all hosts; see `restore_newest`."""
    shapes = [experiment.state_shape for experiment in experiments]
    found = [restore_newest(*pair) for pair in zip(folders, experiments)] if hosts.is_first() else []
    # Whether the clients' memory and records are in the state, or in a file beside it; None: nothing is resumed.
    have_memory = hosts.from_first(
        lambda: [None if state is None else bool(jax.tree.leaves(state.of_clients)) for state in found]
    )
    like = [
        None if inside is None else shape if inside else shape._replace(clients={}, records={})
        for shape, inside in zip(shapes, have_memory)
    ]
    return hosts.tree_from_first(lambda: found, like)


def why_ended(
    experiments: list[Experiment], folders: list[Workdir | None], states: Sequence[State | None]
) -> list[str]:
    """Why each run is over, on all hosts, see `fedjax_ssl.records.ending`; '' for a run that can go on."""

    def of_one(experiment: Experiment, folder: Workdir, state: State | None) -> str:
        if state is None:
            return ""
        config, done = experiment.problem.config, int(state.round)
        if done >= config.num_rounds:
            return ROUNDS
        return spent(folder.read(METRICS)[:done]).reason(config.stop)

    return hosts.from_first(lambda: [of_one(*parts) for parts in zip(experiments, folders, states)])


def checkpoints_of(folder: Workdir, experiment: Experiment, name: str = CHECKPOINTS) -> Checkpoints:
    """A run's checkpoints, with the facts that they were trained with; `name` is CHECKPOINTS or BEST."""
    run = trained_with(folder.config, experiment.dataset, experiment.partition, experiment.secret)
    return Checkpoints(folder.path / name, run=run)


def restore_newest(folder: Workdir, experiment: Experiment) -> State | None:
    """The state of a run's newest checkpoint that is undamaged and has records of all its rounds; None: it has none.

    Nothing is changed on disk. What is damaged, and the round from which the run therefore continues, is printed.
    Raises a UserError if there are records but no usable checkpoint, or a file belongs to another run.
    """
    if not folder.is_begun:
        return None
    checkpoints, metrics = checkpoints_of(folder, experiment), read_rounds(folder.path / METRICS)
    reached = len(metrics.lines)
    if not checkpoints.rounds():
        if reached:
            raise UserError(
                f"the workdir {folder.path} has records of {reached} rounds, but no checkpoint; put "
                f"{folder.path / CHECKPOINTS} back, or train in another workdir"
            )
        return None
    in_reach = [number for number in checkpoints.rounds() if number <= reached]
    fitting = [number for number in in_reach if checkpoints.fits(number, folder.checksum(number))]
    changed = []
    if fitting != in_reach:  # the lines are valid records, but a figure has changed
        changed = [f"{folder.path / METRICS} is not what was written"]
        reached = max(fitting, default=reached)
    restored = checkpoints.restore(_shape_in(checkpoints, experiment, reached), reached)
    folder.is_changed = bool(changed) and restored.round < len(metrics.lines)
    timed = {line["round"] for line in folder.read(TIMINGS) if line.get("seconds") is not None}
    untimed = sum(number not in timed for number in range(1, restored.round + 1))
    for line in filter(None, [metrics.damage, *changed, *restored.passed_over]):
        warn(f"{line}; the run goes on from round {restored.round}")
    if untimed:
        warn(
            f"{folder.path / TIMINGS} has no seconds of {untimed} of {restored.round} rounds; the summary's "
            "seconds are without them"
        )
    return restored.state


def _shape_in(checkpoints: Checkpoints, experiment: Experiment, reached: int) -> State:
    """The shapes in the checkpoint that is restored, with the clients' memory in it or in a file beside it."""
    shape = experiment.state_shape
    if not jax.tree.leaves(shape.of_clients):
        return shape
    if not any(name.startswith((".clients", ".records")) for name in checkpoints.shapes(reached=reached)):
        return shape._replace(clients={}, records={})
    number = experiment.problem.config.num_clients
    of_all = lambda leaf: jax.ShapeDtypeStruct((number, *leaf.shape[1:]), leaf.dtype)  # noqa: E731
    return shape._replace(clients=jax.tree.map(of_all, shape.clients), records=jax.tree.map(of_all, shape.records))
