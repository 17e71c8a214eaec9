"""A run from its configuration to its trained model: `train(config, workdir)`."""

import concurrent.futures
import contextlib
import functools
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

from fedjax_ssl.augment import strong_augment, weak_augment
from fedjax_ssl.backend import (
    check_memory,
    compiler_options,
    default_lanes,
    jit_on_all_devices,
    on_all_devices,
    seeds_together,
    use_compilation_cache,
    use_devices,
)
from fedjax_ssl.checkpoints import Checkpoints
from fedjax_ssl.config import for_seed, validate
from fedjax_ssl.data import (
    Dataset,
    FederatedData,
    Partition,
    class_counts,
    dataset_facts,
    federate,
    load_dataset,
    load_partition,
    make_partition,
    save_partition,
    stack_seeds,
)
from fedjax_ssl.errors import TrainingError
from fedjax_ssl.files import replace_arrays, replace_file
from fedjax_ssl.lanes import row
from fedjax_ssl.live import Live, open_live
from fedjax_ssl.method import Method, Problem, State
from fedjax_ssl.methods import DOUBLE_HEADED, METHODS
from fedjax_ssl.network import build_network
from fedjax_ssl.progress import RoundProgress, title_of
from fedjax_ssl.records import bytes_per_client, summarise, to_record, what_went_wrong
from fedjax_ssl.rounds import init_key, make_dispatch, make_round, over_seeds
from fedjax_ssl.signals import Signals
from fedjax_ssl.snapshots import make_snapshot, save_snapshot
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

DISPATCH_CAPACITY = 50  # rounds in one dispatch at the most
DISPATCH_SECONDS = 1.0  # aimed at: how long a progress bar stands still and a signal waits


class Experiment(NamedTuple):
    """Everything that a run is made of, before anything is trained or written.

    Attributes:
        problem: the fixed part.
        method: the method.
        data: the federation, on the device.
        hidden_labels: int32 [N], the truth, for scoring only.
        partition: who owns which rows.
        dataset: on the host.
        state_shape: a state's shapes. Tracing is slow, and everything that needs them takes them from here.
    """

    problem: Problem
    method: Method
    data: FederatedData
    hidden_labels: jax.Array
    partition: Partition
    dataset: Dataset
    state_shape: State


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


class Program(NamedTuple):
    """The compiled functions of a run, the same for every seed."""

    init: Callable  # data -> state
    dispatch: Callable  # (states, data, hidden labels, number of rounds) -> Dispatch
    snapshot: Callable  # (params, batch_stats, test images, test labels) -> what `make_snapshot` says
    seconds: float  # that compiling took


def train(config: ConfigDict, workdir: str | os.PathLike | None = None) -> State | tuple[State, ...]:
    """Trains what a configuration describes, or takes the run in `workdir` up where it was left.

    Args:
        config: see `fedjax_ssl.config.base_config`.
        workdir: the run's folder; by default a fresh one under runs/. It gets config.json, partition.npz,
            metrics.jsonl (a line a round, the same whatever the clock says), timings.jsonl, summary.json and
            checkpoints/. With `config.seeds` each seed's run lies in a folder seed_N of its own in there, as if it
            had been trained alone.

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
        programs = {len(group): compile_program(config, group, runs) for group in {len(g): g for g in groups}.values()}
        if workdir is None and config.seeds:
            parent = fresh_workdir(pathlib.Path("runs"), config.method)
            for run in runs:
                run.folder.path = parent / f"seed_{run.folder.config['seed']}"

        states = {run.folder.config["seed"]: run.state for run in runs}
        for run in filter(is_over, runs):
            _conclude(run)  # it may have been killed before its summary
        for group in groups:
            trained = _train_group(config, group, programs[len(group)])
            states.update(zip([run.folder.config["seed"] for run in group], trained))
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
    if run.state is None:
        return False
    converged = run.experiment.method.converged or (lambda state: False)
    return run.round >= run.experiment.problem.config.num_rounds or bool(converged(run.state))


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


def build_experiment(config: ConfigDict, partition_file: pathlib.Path | None = None) -> Experiment:
    """Everything that a run is made of; see `build_experiments`."""
    return build_experiments([config], [partition_file])[0]


def build_experiments(configs: list[ConfigDict], partition_files: list[pathlib.Path | None]) -> list[Experiment]:
    """Everything that runs of one configuration and several seeds are made of, with arrays of the same shapes.

    Args:
        configs: valid configurations that differ in nothing but the seed.
        partition_files: the partitions of runs that are taken up again, where there are some.

    Raises:
        UserError: the data are not there or not what the configuration needs, or a name is unknown.
    """
    config = configs[0]
    dataset = load_dataset(config.data)
    partitions = [
        load_partition(file, len(dataset.y_train), config.num_clients)
        if file is not None and file.exists()
        else make_partition(dataset.y_train, dataset.num_classes, config.data, config.num_clients, c.seed)
        for c, file in zip(configs, partition_files)
    ]
    width = max(len(rows) for partition in partitions for rows in partition.client_rows)
    weak = functools.partial(weak_augment, flip=dataset.flip, padding=config.augment.padding)
    strong = functools.partial(
        strong_augment,
        flip=dataset.flip,
        padding=config.augment.padding,
        flavour=config.augment.flavour,
        num_ops=config.augment.num_ops,
        magnitude=config.augment.magnitude,
    )
    network = build_network(config, dataset_facts(dataset), config.method in DOUBLE_HEADED)
    experiments, first = [], None
    for c, partition in zip(configs, partitions):
        problem = Problem(c, network, weak, strong, dataset.num_classes)
        method = METHODS[config.method](problem)
        data, hidden_labels = federate(
            dataset, partition, c.seed, max(1, width), first, config.data.reveal_labels, config.data.centralised
        )
        first = first or data
        shape = experiments[0].state_shape if experiments else jax.eval_shape(_initialise(method), data)
        experiments.append(Experiment(problem, method, data, hidden_labels, partition, dataset, shape))
    return experiments


def initialise(experiment: Experiment, data: FederatedData) -> State:
    """The state before the first round: initialised, pre-trained, with statistics from the server's images."""
    return _initialise(experiment.method)(data)


def _initialise(method: Method) -> Callable[[FederatedData], State]:
    def init(data):
        state = method.init(data, init_key(data.seed))
        return method.statistics(state, data, jnp.zeros((0,), jnp.int32))

    return init


def compile_program(config: ConfigDict, group: list[Run], runs: list[Run]) -> Program:
    """Compiles what a group of runs needs; other groups of the same size among all `runs` need nothing else.

    Raises:
        UserError: something that only tracing meets, or too little memory.
    """
    started = time.monotonic()
    experiments = [run.experiment for run in group]
    with concurrent.futures.ThreadPoolExecutor(1) as aside:  # the compiler does not hold Python's lock
        init = None
        if any(run.state is None for run in runs):  # A run that was begun has its state from a checkpoint.
            init = functools.partial(initialise, experiments[0])
            init = jit_on_all_devices(init, compiler_options=compiler_options(config))
            lowered = init.lower(experiments[0].data)
            init = aside.submit(lowered.compile)
        snapshot = aside.submit(_lower_snapshot(config, experiments[0]).compile)
        dispatch = compile_dispatch(config, experiments)
        return Program(init and init.result(), dispatch, snapshot.result(), time.monotonic() - started)


def _lower_snapshot(config: ConfigDict, experiment: Experiment) -> jax.stages.Lowered:
    snapshot = make_snapshot(experiment.problem.network, config.eval_batch_size)
    snapshot = jit_on_all_devices(snapshot, compiler_options=compiler_options(config))
    state, data = experiment.state_shape, experiment.data
    return snapshot.lower(state.params, state.batch_stats, data.test_images, data.test_labels)


def compile_dispatch(config: ConfigDict, experiments: list[Experiment]) -> Callable:
    """Compiles the program of many rounds, for one experiment or for several seeds' together.

    Raises:
        UserError: it does not fit into the memory.
    """
    first, num_seeds = experiments[0], len(experiments)
    round_fn = make_round(first.problem, first.method, default_lanes(config, num_seeds))
    state, data = first.state_shape, first.data
    if num_seeds > 1:
        round_fn = over_seeds(round_fn)
        state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_seeds, *leaf.shape), leaf.dtype), state)
        data = jax.eval_shape(stack_seeds, [experiment.data for experiment in experiments])
    capacity = max(config.rounds_per_dispatch or 0, DISPATCH_CAPACITY)
    dispatch = make_dispatch(round_fn, capacity, first.method.converged)
    dispatch = jit_on_all_devices(dispatch, donate_argnums=0, compiler_options=compiler_options(config))
    dispatch = dispatch.lower(state, data, first.hidden_labels, jnp.int32(1)).compile()
    check_memory(dispatch)
    return dispatch


def _train_group(config: ConfigDict, group: list[Run], program: Program) -> list[State]:
    """Runs that go through the lanes together, from where they stand to the end; their states."""
    first_round = group[0].round
    for run in group:
        run.folder.begin(first_round)
        run.folder.append(TIMINGS, [{"round": first_round, "compile_seconds": program.seconds / len(group)}])
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
        states = _run_rounds(config, group, states, program, checkpoints, progress, signals)
    for run in group:
        _conclude(run)
    return states


def _conclude(run: Run) -> None:
    """Writes what a finished run ends with, unless it is there. A report that fails takes nothing away from the run."""
    if run.folder.is_summarised():
        return
    config = run.experiment.problem.config
    run.folder.write_summary(summarise(config, run.folder))
    if not config.log.report:
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

    converged = experiment.method.converged or (lambda state: False)

    def take_snapshots() -> None:
        for number, run in enumerate(group):
            own = of_run(state, number)
            taken = program.snapshot(own.params, own.batch_stats, data.test_images, data.test_labels)
            save_snapshot(run.folder.path / SNAPSHOTS, done, jax.device_get(taken))

    if done in config.snapshot_rounds:
        take_snapshots()
    signals.act()
    while done < num_rounds and not converged(state):
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
        is_over = done == num_rounds or converged(state)
        if is_over or done in config.snapshot_rounds:
            take_snapshots()
        if is_over or done % checkpoint_every == 0 or signals.received:
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
