"""`tune`: times the ways to lay out a cohort on this machine and stores the fastest for later runs."""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fedjax_ssl.base.devices import platform
from fedjax_ssl.base.errors import UserError
from fedjax_ssl.engine.cohort import cohort_of, train_cohort
from fedjax_ssl.engine.interface import Phase
from fedjax_ssl.engine.round import select_of
from fedjax_ssl.engine.tracing import num_jobs
from fedjax_ssl.models.passes import lane_form
from fedjax_ssl.run.choices import Choice, remember
from fedjax_ssl.run.experiment import Experiment, build_experiment, build_whole, initialise
from fedjax_ssl.run.machine import (
    compiler_option_sets,
    machine_of,
    most_devices,
    most_lanes,
    use,
    use_compilation_cache,
)
from fedjax_ssl.run.observe.clock import doing
from fedjax_ssl.run.observe.log import say
from fedjax_ssl.run.validation import validate

STEPS = 4  # steps of each client in a measurement
# Forms of several lanes to try around the fastest choice. A TPU's compiler estimates 'im2col' to be far slower.
OTHER_FORMS = {"tpu": ("grouped", "loop")}
OTHER_DTYPE = {"float32": "bfloat16", "bfloat16": "float32"}


class Measured(NamedTuple):
    """The measurement of one choice."""

    choice: Choice  # what was measured
    dtype: str  # the data type of the computation
    # Of one client's step: the median over the repeats, including labelling of the cohort. None: the choice does not
    # fit into the memory.
    seconds: float | None
    compile_seconds: float  # including tracing


def tune(config: ConfigDict, repeats: int = 3) -> list[Measured]:
    """Times choices of devices, lanes, form of convolutions and XLA options, prints them, and stores the fastest.

    Args:
        config: of the runs to tune for. Its clients label and make a few steps; their results are discarded.
        repeats: how often each choice is timed.

    Returns:
        All measurements in order. The last one has the other dtype, which would change results and is never stored.

    Raises:
        UserError: the configuration or the data cannot be used, `devices` or `lanes` is set, or the method trains no
            clients.
    """
    validate(config)
    if repeats < 1:
        raise UserError(f"repeats must be at least 1, not {repeats}")
    if config.devices is not None or config.lanes is not None:
        raise UserError("devices and lanes are what tune looks for; leave them None")
    use_compilation_cache()
    config = config.copy_and_resolve_references()
    config.server.pretrain_epochs = 0  # the weights' values do not affect the time
    with doing("reading and dividing the data"):
        experiment = build_whole(config, "tune")
    if not experiment.method.phases:
        raise UserError(f"the method {config.method} trains no clients: there is nothing to tune")
    with doing("the first state"):
        state = jax.jit(functools.partial(initialise, experiment))(experiment.data)
    jobs = num_jobs(experiment.problem, experiment.method, experiment.state_shape, experiment.data)
    time_one = functools.partial(time_steps, state=state, jobs=jobs, repeats=repeats)
    measured = search(first_choices(config, experiment, jobs), jobs, functools.partial(time_one, experiment))
    best = fastest(measured)
    path = remember(config, experiment.data.inputs.shape[1:], best.choice)
    config.model.dtype = OTHER_DTYPE[config.model.dtype]
    with contextlib.suppress(UserError):  # a user's backbone may have one dtype
        measured.append(time_one(build_experiment(config), best.choice))
    print(as_table(measured, best))
    print(f"fastest: {best.choice}; runs like this one take it from now on ({path})")
    return measured


def first_choices(config: ConfigDict, experiment: Experiment, jobs: int) -> list[Choice]:
    """The first choices: on a CPU one device or one for each client, with one lane; elsewhere more and more lanes."""
    everything = jax.device_count()
    if platform() == "cpu":
        most = min(everything, most_devices(config, experiment.data))
        return [Choice(n, 1, "", options) for n in sorted({1, most}) for options in compiler_option_sets()]
    on_each = -(-jobs // everything)
    several = {1, most_lanes(config) or 3, 10, on_each}
    return [Choice(everything, lanes, lane_form()) for lanes in sorted({min(lanes, on_each) for lanes in several})]


def search(first: list[Choice], jobs: int, measure: Callable[[Choice], Measured]) -> list[Measured]:
    """Measures the first choices, then other forms of several lanes around the fastest one."""
    measured = [measure(choice) for choice in first]
    best = fastest(measured).choice
    lanes = best.lanes if best.lanes > 1 else min(2, -(-jobs // best.devices))
    if lanes > 1:
        forms = OTHER_FORMS.get(platform(), ("loop", "im2col"))
        forms = [form for form in forms if (lanes, form) != (best.lanes, best.lane_form)]
        measured += [measure(best._replace(lanes=lanes, lane_form=form)) for form in forms]
    return measured


def fastest(measured: list[Measured]) -> Measured:
    """The measurement with the shortest steps.

    Raises:
        UserError: no choice fits into the memory.
    """
    fitting = [one for one in measured if one.seconds is not None]
    if not fitting:
        raise UserError("no choice fits into the memory; lower client.batch_size or eval_batch_size")
    return min(fitting, key=lambda one: one.seconds)


def time_steps(experiment: Experiment, choice: Choice, state: Any, jobs: int, repeats: int) -> Measured:
    """Times a cohort that trains for `STEPS` steps of each client, repeatedly."""
    config = experiment.problem.config
    machine, dtype = machine_of(choice, config), config.model.dtype
    with use(machine), doing(f"measuring {choice}, {dtype}"):
        started = time.perf_counter()
        steps = functools.partial(cohort_steps, experiment, jobs, machine.lanes(jobs))
        arguments = machine.put((state, experiment.data))
        try:
            program = machine.jit(steps).lower(*arguments).compile()
            machine.check_memory(program)
            compiled = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            seconds = []
            for _ in range(repeats):
                before = time.perf_counter()
                jax.block_until_ready(program(*arguments))
                seconds.append(time.perf_counter() - before)
        except (UserError, jax.errors.JaxRuntimeError) as error:
            if not isinstance(error, UserError) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return Measured(choice, dtype, None, time.perf_counter() - started)
    found = Measured(
        choice, dtype, statistics.median(seconds) / (jobs * STEPS * len(experiment.method.phases)), compiled - started
    )
    say(f"{1000 * found.seconds:.3g} ms a step: {choice}, {dtype}")
    return found


def cohort_steps(experiment: Experiment, jobs: int, lanes: int, state: Any, data: Any) -> tuple[Any, jax.Array]:
    """The uploads of a cohort whose clients make `STEPS` steps in every phase; and their step counts, int32 [R]."""
    method, key = experiment.method, jax.random.key(0)
    selection = select_of(experiment.problem, method)(state, data, key)
    clients, group = selection.clients[:jobs], None if selection.group is None else selection.group[:jobs]
    if group is None and selection.turns > 1:
        group = jnp.zeros_like(clients)
    personal = () if method.personal is None else method.personal(state, data, clients, key)
    phases = tuple(map(_of_equal_jobs, method.phases))
    cohort = cohort_of(state, data, clients, group, personal, key)
    result = train_cohort(phases, method.broadcast(state, data, key), data, cohort, lanes)
    return result.upload, result.num_steps


def _of_equal_jobs(phase: Phase) -> Phase:
    def prepare(*arguments):
        jobs = phase.prepare(*arguments)
        return jobs._replace(num_steps=jnp.full_like(jobs.num_steps, STEPS), takes_part=None)

    return phase._replace(prepare=prepare)


def as_table(measured: list[Measured], best: Measured) -> str:
    """The measurements as a Markdown table, in milliseconds per step of a client, and as multiples of the best."""
    lines = ["| choice | dtype | ms a step | to the fastest | compiling, s |", "|---|---|---|---|---|"]
    for one in measured:
        step = "too large" if one.seconds is None else f"{1000 * one.seconds:.3g}"
        ratio = "" if one.seconds is None else f"{one.seconds / best.seconds:.2f}"
        lines.append(f"| {one.choice} | {one.dtype} | {step} | {ratio} | {one.compile_seconds:.1f} |")
    return "\n".join(lines)
