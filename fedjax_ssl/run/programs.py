"""The compiled programs of a run: its initialisation, many rounds in one dispatch, a snapshot."""

import concurrent.futures
import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.data import stack_seeds
from fedjax_ssl.engine.evaluation import make_snapshot
from fedjax_ssl.engine.round import make_dispatch, make_round, num_jobs, over_seeds
from fedjax_ssl.run.experiment import Experiment, initialise
from fedjax_ssl.run.machine import Machine

DISPATCH_CAPACITY = 50  # rounds in one dispatch at the most


class Program(NamedTuple):
    """The compiled functions of a run, the same for every seed."""

    init: Callable | None  # data -> state
    dispatch: Callable  # (states, data, hidden labels, number of rounds) -> Dispatch
    snapshot: Callable  # (model, test images, test labels) -> what `make_snapshot` says
    seconds: float  # that compiling took


def compile_program(machine: Machine, experiments: list[Experiment], with_init: bool) -> Program:
    """Compiles the programs of runs that go through the lanes together, for every group of so many seeds.

    Args:
        machine: what the program runs on.
        experiments: one for each seed.
        with_init: whether a run begins; one that is resumed has its state from a checkpoint.

    Raises:
        UserError: an error that only tracing detects, or too little memory.
    """
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1) as aside:  # the compiler does not hold Python's lock
        init = None
        if with_init:
            lowered = machine.jit(functools.partial(initialise, experiments[0])).lower(experiments[0].data)
            init = aside.submit(lowered.compile)
        snapshot = aside.submit(_lower_snapshot(machine, experiments[0]).compile)
        dispatch = compile_dispatch(machine, experiments)
        return Program(init and init.result(), dispatch, snapshot.result(), time.monotonic() - started)


def _lower_snapshot(machine: Machine, experiment: Experiment) -> jax.stages.Lowered:
    snapshot = make_snapshot(experiment.problem.network, experiment.problem.config.eval_batch_size)
    state, data = experiment.state_shape, experiment.data
    return machine.jit(snapshot).lower(state.model, data.test_images, data.test_labels)


def compile_dispatch(machine: Machine, experiments: list[Experiment]) -> Callable:
    """Compiles the program of many rounds, for one experiment or for several seeds' together.

    Raises:
        UserError: it does not fit into the memory.
    """
    first, num_seeds = experiments[0], len(experiments)
    config = first.problem.config
    jobs = num_jobs(first.problem, first.method, first.state_shape, first.data)
    round_fn = make_round(first.problem, first.method, machine.lanes(num_seeds * jobs))
    state, data = first.state_shape, first.data
    if num_seeds > 1:
        round_fn = over_seeds(round_fn)
        state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_seeds, *leaf.shape), leaf.dtype), state)
        data = jax.eval_shape(stack_seeds, [experiment.data for experiment in experiments])
    capacity = max(config.rounds_per_dispatch or 0, DISPATCH_CAPACITY)
    dispatch = machine.jit(make_dispatch(round_fn, capacity, first.method.converged), donate_argnums=0)
    program = dispatch.lower(state, data, first.hidden_labels, jnp.int32(1)).compile()
    machine.check_memory(program)
    return program
