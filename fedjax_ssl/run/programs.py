"""The compiled programs of a run: its initialisation, many rounds in one dispatch, a snapshot."""

import concurrent.futures
import functools
import os
import time
import zlib
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.base.files import expanded
from fedjax_ssl.base.imports import CODE_FIELDS, is_own, loaded
from fedjax_ssl.config import flatten, numbers_of
from fedjax_ssl.data import stack_seeds
from fedjax_ssl.data.sources import dataset_facts
from fedjax_ssl.engine.dispatch import make_dispatch, over_seeds
from fedjax_ssl.engine.evaluation import make_snapshot
from fedjax_ssl.engine.round import make_round
from fedjax_ssl.engine.tracing import Exchange, exchange_of, num_jobs
from fedjax_ssl.methods import METHODS, NAMES
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.records.ending import VALIDATION_ACCURACY
from fedjax_ssl.run import hosts
from fedjax_ssl.run.client_tests import clients_at_once, make_client_tests
from fedjax_ssl.run.experiment import Experiment, with_numbers
from fedjax_ssl.run.machine import Machine
from fedjax_ssl.run.memory import give_back_memory
from fedjax_ssl.run.observe.clock import doing
from fedjax_ssl.run.observe.log import VERBOSE, say
from fedjax_ssl.run.wire import Traffic, traffic_of

CLIENTS_TESTS = "the tests of clients"
DISPATCH_CAPACITY = 50  # the most rounds in one dispatch
MOST_KEPT = 4  # programs that a process keeps for later runs
# Fields on which no program depends: a seed is data.
IN_NO_PROGRAM = ("checkpoint_every", "log.report", "log.tensorboard", "log.wandb_project", "seed", "seeds")


class Program(NamedTuple):
    """The compiled functions of a run; seeds of equal shapes share them."""

    init: jax.stages.Compiled | None  # (data, the model to begin with or None) -> state
    # Width of the clients' rows -> (states, data, hidden labels, number of rounds) -> Dispatch.
    dispatch: Mapping[int, jax.stages.Compiled]
    # Name of a set -> (model, its images, its labels) -> see `make_snapshot`.
    snapshots: Mapping[str, jax.stages.Compiled]
    traffic: Traffic  # bytes of a round
    seconds: float  # of compilation
    client_tests: jax.stages.Compiled | None = None  # see `make_client_tests`; None: clients have no test images


_KEPT: dict[Hashable, Program] = {}  # by what a program depends on, the one that was used last at the end


def compile_program(machine: Machine, experiments: list[Experiment], with_init: bool, given: Model | None) -> Program:
    """Compiles the programs for runs that train together, or takes those of earlier runs of this process.

    Runs share programs if their configurations differ only in seeds and in the numbers that programs take as arguments,
    see `numbers_of`, and if all shapes are equal. `with_init` says whether a run begins; a resumed run takes its state
    from a checkpoint. `given` are the parts of a model that a run begins with, see `initialiser`; of any run, since
    only shapes matter. Raises a UserError for what only tracing detects, too little memory, or hosts whose programs
    differ.
    """
    key = _depends_on(machine, experiments, given)
    kept = _KEPT.pop(key, None)
    if kept is not None and (kept.init is not None or not with_init):
        _KEPT[key] = kept
        say("compiled before, 0 s")
        return kept._replace(seconds=0.0)
    while len(_KEPT) >= MOST_KEPT:
        del _KEPT[next(iter(_KEPT))]
        jax.clear_caches()  # of small programs, which only runs of these programs may need
    program = _compile_all(machine, experiments, with_init, given)
    _KEPT[key] = program
    return program


def _depends_on(machine: Machine, experiments: list[Experiment], given: Model | None) -> Hashable:
    """What the programs of runs depend on."""
    first = experiments[0]
    config = first.problem.config
    weights = config.encoder.weights and os.stat(expanded(config.encoder.weights)).st_mtime_ns
    numbers = numbers_of(config)
    fields = {name: value for name, value in flatten(config).items() if name not in (*numbers, *IN_NO_PROGRAM)}
    own = [fields[name] for name in CODE_FIELDS if is_own(fields[name])]
    code: list[Any] = [loaded(name) for name in own]
    # A notebook's or a module's code may change while its names stay: only the runs of one call of `train` share it.
    if config.method in METHODS.keys() - set(NAMES) or any(".py:" not in name for name in own):
        code = [first.init]
    settings = [getattr(jax.config, name, None) for name in jax.config.values]
    leaves, structure = jax.tree.flatten((first.state_shape, given))
    shapes = first.shapes, structure, *((leaf.shape, leaf.dtype) for leaf in leaves)
    inputs = repr(dataset_facts(first.dataset._replace(row_sums=None))), first.problem.lacks_labels, weights
    texts = repr((sorted(fields.items()), sorted(numbers), settings))
    return machine, len(experiments), texts, *code, *inputs, *shapes


def _compile_all(machine: Machine, experiments: list[Experiment], with_init: bool, given: Model | None) -> Program:
    """Compiles the programs; see `compile_program`."""
    first, lower = experiments[0], {}
    if with_init:
        lower["the first state"] = lambda: machine.jit(first.init).lower(first.data, given)
    snapshots = {name: f"the outputs on {name} images" for name in _snapshot_sets(first)}
    lower |= {title: functools.partial(_lower_snapshot, machine, first, name) for name, title in snapshots.items()}
    if first.test_width:
        lower[CLIENTS_TESTS] = lambda: _lower_client_tests(machine, first)
    rounds = dict.fromkeys(_widths(first)[-1:], "the rounds")
    rounds |= {width: f"the rounds of clients with at most {width} images" for width in _widths(first)[:-1]}
    told: list[Exchange] = []  # a round's messages, by its trace
    tell = lambda *messages: told.append(exchange_of(*messages))  # noqa: E731
    for width, title in rounds.items():
        lower[title] = functools.partial(lower_dispatch, machine, experiments, width, tell)
    started = time.monotonic()
    say("compiling (a later start takes it from the cache)")
    programs = _compile(lower)
    machine.check_memory(programs["the rounds"])
    if with_init:
        machine.check_memory(programs["the first state"], "the first state")
    return Program(
        programs.get("the first state"),
        {width: programs[title] for width, title in rounds.items()},
        {name: programs[title] for name, title in snapshots.items()},
        traffic_of(first.problem, first.state_shape, told[0] if told else None),
        time.monotonic() - started,
        programs.get(CLIENTS_TESTS),
    )


def _compile(lower: dict[str, Callable[[], jax.stages.Lowered]]) -> dict[str, jax.stages.Compiled]:
    """Traces programs one after the other and compiles each while the next is traced; the last one is the largest.

    One thread compiles the rounds, another one the small programs: XLA's compiler releases Python's lock. The main
    thread only waits, so that Python still handles signals. After an exception it does not wait for the threads.
    """

    def compiled(name: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        started = time.monotonic()
        program = lowered.compile()
        say(f"compiled {name} in {time.monotonic() - started:.1f} s", VERBOSE)
        return program

    large, aside = (concurrent.futures.ThreadPoolExecutor(1, "compiler") for _ in range(2))
    begun: dict[str, concurrent.futures.Future[jax.stages.Compiled]] = {}
    try:
        with doing("compiling") as task:
            for name, function in lower.items():
                task.text = f"tracing {name}"
                lowered = function()
                check_same_program(name, lowered)
                begun[name] = (large if name.startswith("the rounds") else aside).submit(compiled, name, lowered)
            programs = {}
            for name, program in begun.items():
                task.text = f"compiling {name}"
                programs[name] = program.result()
    finally:
        for pool in (large, aside):
            pool.shutdown(wait=False, cancel_futures=True)
    give_back_memory()
    return programs


def check_same_program(name: str, lowered: jax.stages.Lowered) -> None:
    """Raises a UserError unless all hosts are about to compile the same program; others would wait for ever."""
    hosts.check_same("the programs", lambda: f"{name} with checksum {zlib.crc32(lowered.as_text().encode()):08x}")


def _snapshot_sets(experiment: Experiment) -> tuple[str, ...]:
    """The test set; also the validation images if there are any and a snapshot is due before the last round."""
    config = experiment.problem.config
    is_due = any(number < config.num_rounds for number in config.snapshot_rounds)
    return ("test", "validation") if len(experiment.data.validation_index) and is_due else ("test",)


def _lower_snapshot(machine: Machine, experiment: Experiment, name: str) -> jax.stages.Lowered:
    config, data, model = experiment.problem.config, experiment.data, experiment.state_shape.model
    snapshot = machine.jit(make_snapshot(experiment.problem.network, config.eval_batch_size, config.eval_measures))
    if name == "test":
        return snapshot.lower(model, data.test_inputs, data.test_labels)
    rows = data.validation_index
    images = jax.ShapeDtypeStruct((len(rows), *data.inputs.shape[1:]), data.inputs.dtype)
    return snapshot.lower(model, images, jax.ShapeDtypeStruct(rows.shape, jnp.int32))


def _lower_client_tests(machine: Machine, experiment: Experiment) -> jax.stages.Lowered:
    number, inputs, width = clients_at_once(experiment), experiment.dataset.x_train, experiment.test_width
    images = jax.ShapeDtypeStruct((number, width, *inputs.shape[1:]), inputs.dtype)
    clients, labels = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((number,), (number, width)))
    make = functools.partial(make_client_tests, lanes=machine.lanes(number))
    test = machine.jit(with_numbers(experiment.problem, make))
    present = jax.ShapeDtypeStruct((number,), bool)
    return test.lower(experiment.state_shape, experiment.largest, clients, present, images, labels)


def compile_dispatch(machine: Machine, experiment: Experiment) -> jax.stages.Compiled:
    """Compiles only the program of many rounds."""
    program = _compile({"the rounds": lambda: lower_dispatch(machine, [experiment])})["the rounds"]
    machine.check_memory(program)
    return program


def _widths(experiment: Experiment) -> tuple[int, ...]:
    """The widths of the rounds' tables; each width is a program of its own."""
    return (experiment.data.width,) if experiment.views is None else experiment.views.widths


def lower_dispatch(
    machine: Machine, experiments: list[Experiment], width: int | None = None, tell: Any = None
) -> jax.stages.Lowered:
    """Traces the program of many rounds for one experiment, or for those of several seeds together.

    `width` is that of the clients' rows, if a federation has views; None: the largest. For `tell` see `make_round`.
    """
    first, num_seeds = experiments[0], len(experiments)
    config = first.problem.config
    lanes = machine.lanes(num_seeds * num_jobs(first.problem, first.method, first.state_shape, first.data))
    round_fn = with_numbers(first.problem, functools.partial(make_round, lanes=lanes, tell=tell))
    state, data, hidden_labels = first.state_shape, first.data, first.hidden_labels
    if first.views is not None:
        data, hidden_labels = first.views.shapes(width or data.width)
        if data.width != first.data.width:
            state = jax.eval_shape(first.init, data, None)
    if num_seeds > 1:
        round_fn = over_seeds(round_fn)
        state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_seeds, *leaf.shape), leaf.dtype), state)
        data = jax.eval_shape(stack_seeds, [experiment.data for experiment in experiments])
    capacity = max(config.rounds_per_dispatch or 0, DISPATCH_CAPACITY)
    best_by = VALIDATION_ACCURACY if config.data.validation else ""
    dispatch = machine.jit(make_dispatch(round_fn, capacity, best_by), donate_argnums=0)
    return dispatch.lower(state, data, hidden_labels, jax.ShapeDtypeStruct((), jnp.int32))
