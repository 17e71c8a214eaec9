"""Measures where a round's time goes: a trace of several rounds and a summary as text."""

import collections
import gzip
import json
import math
import os
import pathlib
import re
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fedjax_ssl.base.devices import num_devices, use_platform
from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.files import replace_file
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import State
from fedjax_ssl.engine.tracing import num_jobs, one_job
from fedjax_ssl.ops.trees import row
from fedjax_ssl.records.workdir import check_folder, fresh_workdir
from fedjax_ssl.run.experiment import Experiment, build_whole
from fedjax_ssl.run.machine import use_machine
from fedjax_ssl.run.observe.clock import doing
from fedjax_ssl.run.programs import compile_dispatch
from fedjax_ssl.run.validation import validate

try:
    import resource
except ImportError:  # Windows has no such figure
    resource = None

STAGES = ("label", "train", "aggregate", "server", "statistics", "evaluate")  # the named scopes of a round
_CONTROL = {"while", "conditional", "call"}  # they contain instructions that are counted separately
_STAGE = re.compile(rf"(?:^|[/(])({'|'.join(STAGES)})(?=[/)]|$)")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?[\]})] ([a-z][a-z\-]*)\(")


def profile(config: ConfigDict, rounds: int, workdir: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Runs several rounds under JAX's profiler; returns the contents of profile.json, with times in seconds per round.

    `workdir`, by default a new folder under runs/, gets trace/, profile.json and profile.txt. Raises a UserError if the
    configuration, the data or the folder cannot be used.
    """
    validate(config)
    if rounds < 1:
        raise UserError(f"rounds must be at least 1, not {rounds}")
    check_folder("runs" if workdir is None else workdir)
    if workdir is not None and pathlib.Path(workdir).exists() and any(pathlib.Path(workdir).iterdir()):
        raise UserError(f"the folder {workdir} is not empty; a profile takes a fresh one")
    config = config.copy_and_resolve_references()
    config.seed, config.seeds = (config.seeds or (config.seed,))[0], ()
    config.rounds_per_dispatch = rounds  # they are one dispatch
    with doing("reading and dividing the data"):
        experiment = build_whole(config, "profile")
    with use_machine(config) as machine:
        data, hidden_labels = machine.share((experiment.data, experiment.hidden_labels))
        dispatch = compile_dispatch(machine, experiment)
        with doing("the first state, with pre-training"):
            state = jax.block_until_ready(machine.jit(experiment.init)(data))
        with doing("compiling a client's step, to count its operations"):
            flops = step_flops(experiment, state) if experiment.method.phases else None
        folder = fresh_workdir("profile") if workdir is None else pathlib.Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        with doing("a round before those that are traced"):
            state = dispatch(state, data, hidden_labels, machine.put(jnp.int32(1))).state
            jax.block_until_ready(state)
        with doing(f"tracing rounds: {rounds}"), jax.profiler.trace(str(folder / "trace")):
            started = time.perf_counter()
            result = jax.block_until_ready(dispatch(state, data, hidden_labels, machine.put(jnp.int32(rounds))))
            seconds = time.perf_counter() - started
        with doing("reading the trace"):
            by_stage = seconds_by_stage(folder / "trace", dispatch.as_text(), seconds)
        results, ran = jax.device_get(result.results), int(result.rounds_done)
        jobs = num_jobs(experiment.problem, experiment.method, experiment.state_shape, experiment.data)
        local_steps, lane_steps = (float(s[:ran].sum()) for s in (results.metrics["local_steps"], results.lane_steps))
        figures = {
            "device": f"{jax.devices()[0].device_kind} x {num_devices()}",
            "lanes": machine.lanes(jobs),
            "rounds": ran,
            "seconds_per_round": seconds / ran,
            "seconds_by_stage": {name: value / ran for name, value in by_stage.items()},
            "local_steps_per_round": local_steps / ran,
            "useful_lane_steps": local_steps / lane_steps if lane_steps else None,
            "flops_per_local_step": flops,
            "peak_memory_bytes": peak_memory(),
            "config": json.loads(json.dumps(config.to_dict())),  # in the form in which it is read back
        }
    replace_file(folder / "profile.json", json.dumps(figures, indent=2) + "\n")
    text = describe_profile(figures) + f"\ntrace: {folder / 'trace'} (for TensorBoard, XProf or ui.perfetto.dev)\n"
    replace_file(folder / "profile.txt", text)
    print(text, end="")
    return figures


def seconds_by_stage(folder: pathlib.Path, program: str, seconds: float) -> dict[str, float]:
    """Splits the time of a traced program by stage.

    Args:
        program: the compiled program's text, in which instructions have the names of their scopes.
        seconds: the program's duration. Instructions that ran at the same time share it in proportion to their own
            durations. Time without any instruction counts as 'other'.

    Returns:
        Seconds for each of `STAGES` and for 'other'; their sum is `seconds`.
    """
    stage_of = stages_of_instructions(program)
    busy: collections.Counter[str] = collections.Counter()
    for path in folder.rglob("*.trace.json.gz"):
        for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
            if event.get("ph") == "X":
                name = event.get("args", {}).get("hlo_op", event["name"])
                if name in stage_of:
                    busy[stage_of[name]] += event["dur"] / 1e6
    total = max(sum(busy.values()), seconds)
    by_stage = {stage: busy[stage] / total * seconds for stage in (*STAGES, "other")}
    by_stage["other"] += seconds - sum(by_stage.values())
    return by_stage


def stages_of_instructions(program: str) -> dict[str, str]:
    """Maps each instruction of a compiled program to its stage of the round, or to 'other'."""
    stage_of = {}
    for line in program.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None or match.group(2) in _CONTROL:
            continue
        scope = re.search(r'op_name="([^"]*)"', line)
        stage = _STAGE.search(scope.group(1)) if scope else None
        stage_of[match.group(1)] = stage.group(1) if stage else "other"
    return stage_of


def step_flops(experiment: Experiment, state: Any, data: FederatedData | None = None) -> float:
    """Floating-point operations of one client's local step, as XLA counts them before optimisation.

    They are counted in the GPU's program on all platforms: a TPU's has more, because products select pixels there.
    State and data may be shapes; `data` is the experiment's by default.
    """
    method, data = experiment.method, experiment.data if data is None else data
    phase = method.phases[0]

    def one_step(state: State, data: FederatedData):
        _, broadcast, cohort = one_job(experiment.problem, method, state, data)
        if method.label is not None and len(method.phases) == 1:
            cohort = cohort._replace(labels=method.label(broadcast, data, cohort, None))
        jobs = phase.prepare(broadcast, data, cohort, None)
        work = row(jobs.work, 0)
        return broadcast, work, phase.start(broadcast, data, work, row({**cohort.own, **jobs.own}, 0))

    with use_platform("gpu"):
        broadcast, work, carry = jax.eval_shape(one_step, state, data)
        arguments = (broadcast, data, work, carry, jnp.int32(0), jax.random.key(0))
        return float(jax.jit(phase.step).lower(*arguments).cost_analysis()["flops"])


def peak_memory() -> int | None:
    """Peak bytes on the first device; on a CPU, of the process; None: unknown."""
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats or resource is None:
        return stats.get("peak_bytes_in_use")
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes if sys.platform == "darwin" else 1024 * kilobytes


def describe_profile(figures: dict[str, Any]) -> str:
    """The figures of `profile` as a few lines of text."""
    seconds, by_stage = figures["seconds_per_round"], figures["seconds_by_stage"]
    lines = [
        f"{figures['rounds']} rounds of {seconds:.4g} s, {figures['lanes']} lanes on {figures['device']}",
        *(f"  {stage:<11}{100 * spent / seconds:5.1f} %  {spent:8.4f} s" for stage, spent in by_stage.items()),
    ]
    if by_stage.get("other"):
        lines.append("  other: between the stages, such as cohort sampling, copies and idle time")
    steps, flops = figures["local_steps_per_round"], figures["flops_per_local_step"]
    if steps:
        lines += [
            f"local training: {steps:.0f} steps a round, {flops / 1e6:.1f} MFLOP each, "
            f"{flops * steps / (by_stage['train'] or math.inf) / 1e9:.1f} GFLOP/s",
            f"useful lane steps over all lane steps: {figures['useful_lane_steps']:.3f}",
        ]
    if figures["peak_memory_bytes"] is not None:
        lines.append(f"peak memory: {figures['peak_memory_bytes'] / 2**30:.2f} GiB")
    return "\n".join(lines)
