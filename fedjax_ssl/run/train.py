"""Trains a run from its configuration: `train(config, workdir)`."""

import contextlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from fedjax_ssl.base.files import expanded, replace_arrays, replace_file
from fedjax_ssl.base.imports import CODE_FIELDS, is_own, name_of
from fedjax_ssl.config import flatten
from fedjax_ssl.data import class_counts, save_partition
from fedjax_ssl.data.content import arrays_of_data
from fedjax_ssl.data.sources import dataset_facts
from fedjax_ssl.engine.interface import State
from fedjax_ssl.methods import find_method
from fedjax_ssl.ops.trees import tree_bytes
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.ending import SECONDS, fields_to_raise, in_words
from fedjax_ssl.records.lines import METRICS, SUMMARY, TIMINGS, is_of_last_round, read_summary
from fedjax_ssl.records.origin import note_end, note_start, what_differs
from fedjax_ssl.records.sealed import write_dataset, write_secret
from fedjax_ssl.records.words import measured_each_round
from fedjax_ssl.records.workdir import (
    BEST,
    CHECKPOINTS,
    CLASS_COUNTS,
    INIT_FROM,
    LOG,
    PARTITION,
    REPORT,
    Workdir,
    fresh_workdir,
    save_seeds,
)
from fedjax_ssl.run import hosts
from fedjax_ssl.run.client_memory import ClientMemory, place_memory
from fedjax_ssl.run.decided import FIELDS
from fedjax_ssl.run.feed import make_feed
from fedjax_ssl.run.loop import Listener, Run, make_group, run_rounds
from fedjax_ssl.run.machine import Machine, check_jax_settings, use_compilation_cache, use_machine
from fedjax_ssl.run.observe.clock import doing
from fedjax_ssl.run.observe.listeners import (
    Advise,
    FeedTrackers,
    HearSignals,
    KeepBest,
    SaveCheckpoints,
    SaveSnapshots,
    StopOnFailure,
    StopOnSignal,
    TestClients,
    WriteRecords,
)
from fedjax_ssl.run.observe.log import QUIET, begin, logged, say, warn
from fedjax_ssl.run.observe.progress import RoundProgress, title_of
from fedjax_ssl.run.observe.summary import summarise
from fedjax_ssl.run.observe.trackers import open_trackers
from fedjax_ssl.run.opening import checkpoints_of, open_runs, why_ended
from fedjax_ssl.run.programs import Program, compile_program
from fedjax_ssl.run.seeds import draw, report_seeds
from fedjax_ssl.run.signals import Signals
from fedjax_ssl.run.under_way import under_way
from fedjax_ssl.run.validation import validate


def train(
    config: ConfigDict,
    workdir: str | os.PathLike[str] | None = None,
    on_finish: Callable[[], object] = lambda: None,
    root: str | os.PathLike[str] | None = None,
) -> State | tuple[State, ...]:
    """Trains what a configuration describes, or resumes the run in `workdir`.

    Use processes for several runs at a time: in threads each run.log has the messages of all of them.

    Args:
        config: see `fedjax_ssl.config.base_config`; is not changed.
        workdir: the run's folder; by default a new one under runs/. It gets config.json, partition.npz,
            metrics.jsonl (one line per round, independent of the clock), timings.jsonl, summary.json and checkpoints/.
            With `config.seeds` each seed's run is in its subfolder seed_N, the same as if it had been trained alone,
            and the folder above them gets a table and a page for all.
        on_finish: called when a run has finished and has its summary; with `config.seeds` once for each seed.
        root: the folder that is searched first for `config.init_from`.

    Returns:
        The state after the last round; with `config.seeds` one for each of them.

    Raises:
        UserError: the configuration, JAX's settings, the data or the folder cannot be used; nothing has been written.
          If a later seed of other shapes needs too much memory, a StoppedError says so after the earlier ones.
        TrainingError: the global state is no longer finite, or every upload of a round was dropped.
        StoppedError: the disk, a file or the memory ended the run; its last checkpoint is kept.
        KeyboardInterrupt, SystemExit: after SIGINT, and after SIGTERM, once a checkpoint is written.
    """
    states = train_together([config], [workdir], on_finish, root)
    return states if ConfigDict(config).seeds else states[0]


def train_together(
    configs: list[ConfigDict],
    workdirs: Sequence[str | os.PathLike[str] | None],
    on_finish: Callable[[], object] = lambda: None,
    root: str | os.PathLike[str] | None = None,
) -> tuple[State, ...]:
    """Trains several configurations in one program. They may differ in `numbers_of`, but not in num_rounds.

    Args:
        configs: several must have the same `seeds`, and not none. Runs of equal shapes at the same round train side by
            side, on any device.
        on_finish, root: see `train`, whose errors this raises, too.
    """
    begin()
    # Copies: the caller may change a configuration meanwhile, or have frozen it.
    configs = [hosts.config_of_first(ConfigDict(config).copy_and_resolve_references) for config in configs]
    for one in configs:
        validate(one)
    config = configs[0]
    check_jax_settings()
    use_compilation_cache()
    hosts.check_same("JAX and devices", lambda: f"JAX {jax.__version__} with {jax.local_device_count()} devices")
    is_first = hosts.is_first()
    with contextlib.ExitStack() as open_folders:
        # User errors are raised here, before anything is written.
        with doing("reading and dividing the data"):
            runs = open_runs(configs, [path and expanded(path) for path in workdirs], open_folders, root)
        of_run = flatten(runs[0].experiment.problem.config)
        config.update_from_flattened_dict({field: of_run[field] for field in FIELDS})
        _warn_of_other_code(runs)
        machine = open_folders.enter_context(use_machine(config))
        together = len(runs) if len(configs) > 1 else machine.seeds_together(len(runs))
        groups = group_runs(together, [run for run in runs if not run.ended])
        if groups:
            say(groups[0][0].experiment.examples)
            if machine.mesh is not None:
                say(f"clients train on {machine}")
        # The first one is compiled before anything is written, the others when their turn comes.
        program = _program_of(groups[0], machine, runs) if groups else None
        if is_first and config.seeds:
            _list_seeds(config, workdirs[0], runs, groups)
        states = {id(run): run.state for run in runs}
        for run in (run for run in runs if run.ended):
            _conclude(config, [run], [run.ended], on_finish)  # it may have been killed before it wrote its summary
        if is_first and not groups:
            raised = fields_to_raise([run.ended for run in runs], config)
            more = f"; with a larger {' or '.join(raised)} it goes on" if raised else ""
            say(f"{resumed_by(config, runs[0])} was finished, and nothing was trained{more}")
        for group in groups:
            with _marked(config, group[0]):
                program = program or _program_of(group, machine, runs)
            trained, program = train_group(machine, config, group, program), None
            states.update(zip(map(id, group), trained))
            ends = why_ended([run.experiment for run in group], [run.folder for run in group], trained)
            _conclude(config, group, [ended or SECONDS for ended in ends], on_finish)
        if config.seeds and config.log.report and is_first:
            with _marked(config, runs[0]):
                for folder in dict.fromkeys(run.folder.path.parent for run in runs):
                    report_seeds(folder)
    return tuple(states[id(run)] for run in runs)


def _program_of(group: list[Run], machine: Machine, runs: list[Run]) -> Program:
    """The program of runs that train together; groups of equal shapes share one."""
    any_begins = any(run.state is None for run in runs)
    given = next((run.warm_start.model for run in runs if run.warm_start), None)
    return compile_program(machine, [run.experiment for run in group], any_begins, given)


def _list_seeds(config: ConfigDict, workdir: Any, runs: list[Run], groups: list[list[Run]]) -> None:
    """Writes the list of seeds into the folder above their runs; without a workdir, makes a new folder for them."""
    if workdir is None:
        parent = fresh_workdir(name_of(config.method))
        for run in runs:
            run.folder.path = parent / f"seed_{run.seed}"
    for folder in dict.fromkeys(run.folder.path.parent for group in groups for run in group):
        save_seeds(folder, config.seeds)


def _marked(config: ConfigDict, run: Run) -> contextlib.AbstractContextManager[Any]:
    """See `under_way`; on a host without a folder, does nothing."""
    if run.folder is None:
        return contextlib.nullcontext()
    fields = flatten(config.to_dict())
    return under_way(resumed_by(config, run), any(is_own(str(fields[name])) for name in CODE_FIELDS))


def resumed_by(config: ConfigDict, run: Run) -> pathlib.Path:
    """The workdir that resumes a run of a command: the run's folder, or with several seeds the folder above."""
    return run.folder.path.parent if config.seeds else run.folder.path


def _warn_of_other_code(runs: list[Run]) -> None:
    """Warns, in one line for all resumed runs, if the code that trained them differs from the present code."""
    resumed = [run for run in runs if run.folder is not None and run.state is not None and not run.ended]
    differ = next(filter(None, (what_differs(run.folder.path) for run in resumed)), "")
    if differ:
        warn(f"other code trained this run before ({differ})")


def group_runs(together: int, runs: list[Run]) -> list[list[Run]]:
    """Groups at most `together` runs of equal shapes at the same round, which train together."""
    for run in runs:
        stop = run.experiment.problem.config.stop
        # With a stopping rule seeds may end at different rounds, and each has its own seconds.
        if run.experiment.views is not None or stop.patience or stop.bytes or stop.seconds:
            together = 1
    alike: dict[Hashable, list[Run]] = {}
    for run in runs:
        alike.setdefault((run.round, run.experiment.shapes), []).append(run)
    return [group[first : first + together] for group in alike.values() for first in range(0, len(group), together)]


def train_group(machine: Machine, config: ConfigDict, runs: list[Run], program: Program) -> list[State]:
    """Trains a group of runs from their current round to the end; returns their final states.

    A host that writes nothing runs the same programs in the same order, without the listeners that write.
    `config` is of the whole command, with all seeds. The errors are those of `train`.
    """
    first_round = runs[0].round
    written = [run for run in runs if run.folder is not None]  # all runs; none on a host that writes nothing
    for run in written:
        run.folder.begin(first_round)
        for name in (CHECKPOINTS, BEST):
            Checkpoints(run.folder.path / name).set_aside(after=first_round)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_marked(config, runs[0]))
        stack.enter_context(logged([run.folder.path / LOG for run in written]))
        for run in written:
            run.folder.append(TIMINGS, [{"round": first_round, "compile_seconds": program.seconds / len(runs)}])
            _write_facts(run)
            note_start(run.folder.path)
        trackers = [stack.enter_context(open_trackers(config, run.folder, first_round)) for run in written]
        title = title_of(config.seeds, [run.seed for run in runs])
        first, *others = dict.fromkeys(run.folder.path.parent.name for run in written) or [""]
        if others:
            title = f"{first} (with {', '.join(others)})"
        progress = RoundProgress(config.num_rounds, first_round, title, measured_each_round(config))
        for run in written:
            say(f"workdir {run.folder.path}" + (f", from round {first_round}" if first_round else ""))
        with doing("the first state, with pre-training"):
            states, memories = zip(*(_first_state(machine, program, run, stack) for run in runs))
        group = make_group(machine, runs)
        feed = stack.enter_context(
            make_feed(machine, program.dispatch, runs[0].experiment, group.data, group.hidden_labels, memories[0])
        )
        if written:
            stack.enter_context(progress)
        signals = stack.enter_context(Signals())
        every = checkpoint_interval(config, runs[0].experiment.state_shape)
        checkpoints, bests = (
            [checkpoints_of(run.folder, run.experiment, name) for run in written] for name in (CHECKPOINTS, BEST)
        )
        best = KeepBest(group, bests)
        advice = find_method(config.method).advice(config)
        listeners: list[Listener] = [
            HearSignals(signals),
            *([] if program.client_tests is None else [TestClients(machine, group, program.client_tests, memories)]),
            WriteRecords(written),
            FeedTrackers(trackers),
            *([progress, Advise(advice, len(runs), config.availability.late_weight > 0)] if written else []),
            StopOnFailure(runs),
            SaveSnapshots(group, program.snapshots, config.snapshot_rounds),  # on every host: it computes
            *([best, SaveCheckpoints(group, checkpoints, memories, every, signals, best)] if written else []),
            StopOnSignal(signals),
        ]
        trained = run_rounds(machine, feed, group, list(states), program.traffic, listeners)
        for run in written:
            note_end(run.folder.path)
        return trained


def checkpoint_interval(config: ConfigDict, state: State) -> int:
    """Rounds between two checkpoints of a state (arrays or shapes): more if the state has a model for every client."""
    of_clients = config.num_clients * tree_bytes(state.model.params)
    large = tree_bytes((state.of_clients, state.server)) >= of_clients
    return config.checkpoint_every or (50 if large else 10)


def _first_state(
    machine: Machine, program: Program, run: Run, stack: contextlib.ExitStack
) -> tuple[State, ClientMemory | None]:
    """The state that a run starts from, and the clients' memory if it is outside of it; the stack closes it.

    A run that begins saves the state as its first checkpoint, if it has a folder.
    """
    experiment = run.experiment
    if run.state is not None:
        return place_memory(machine, experiment, run.folder, run.state, stack, begins=False)
    before = time.monotonic()
    given = run.warm_start and run.warm_start.model
    state = jax.block_until_ready(program.init(*machine.share((experiment.data, given))))
    if run.folder is not None:
        run.folder.append(TIMINGS, [{"round": 0, "init_seconds": time.monotonic() - before}])
        run.folder.sync()
    state, memory = place_memory(machine, experiment, run.folder, state, stack, begins=True)
    if run.folder is not None:
        checkpoints_of(run.folder, experiment).save(0, jax.device_get(state), run.folder.checksum(0))
    return state, memory


def _write_facts(run: Run) -> None:
    """Writes what does not change during a run: its secret, partition, data set's facts and warm start."""
    folder, experiment, dataset = run.folder.path, run.experiment, run.experiment.dataset
    if run.state is None and experiment.secret and not experiment.problem.config.privacy.reproducible:
        write_secret(folder, experiment.secret)
    if run.state is None or not (folder / PARTITION).exists():
        earlier = {"earlier_sums": run.warm_start.seen} if run.warm_start else {}
        save_partition(folder / PARTITION, experiment.partition, **arrays_of_data(dataset), **earlier)
    counts = class_counts(dataset.y_train, experiment.partition, dataset.num_classes)
    replace_arrays(folder / CLASS_COUNTS, **counts)
    files = {"files": dict(zip(("train", "test"), dataset.files))} if dataset.files else {}
    write_dataset(folder, {**dataset_facts(dataset), **files})
    if run.warm_start:
        replace_file(folder / INIT_FROM, json.dumps(run.warm_start.facts, indent=2) + "\n")


def _conclude(config: ConfigDict, runs: list[Run], ends: list[str], on_finish: Callable[[], object]) -> None:
    """Writes the summaries and reports of finished runs; `ends` says why each has ended."""
    with _marked(config, runs[0]):
        for run, ended_by in zip(runs, ends):
            if run.folder is not None:
                _write_end(run, run.folder, ended_by)
            on_finish()


def _write_end(run: Run, folder: Workdir, ended_by: str) -> None:
    """Writes a finished run's summary and report, unless they exist. If the report fails, the run does not."""
    config = run.experiment.problem.config

    def write_page() -> pathlib.Path:
        from fedjax_ssl.report import write_report

        return write_report(folder.path)

    with logged([folder.path / LOG]):
        if why := in_words(ended_by, config.stop):
            say(f"{folder.path} ended in round {len(folder.read(METRICS))}: {why}", QUIET)
        report, summary = folder.path / REPORT, folder.path / SUMMARY
        if not is_of_last_round(read_summary(folder.path)[0], folder.read(METRICS)):
            folder.write_summary(summarise(config, folder, ended_by))
        if config.log.report and not (report.exists() and report.stat().st_mtime_ns >= summary.stat().st_mtime_ns):
            draw(write_page, "the report")
