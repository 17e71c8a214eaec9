"""Compiles a run's programs for TPUs and GPUs that are not present, and reports what the compiler says about them.

    python benchmarks/accelerators.py                      # the whole table, hours of CPU time
    python benchmarks/accelerators.py --target=v5e --chips=1 --model=wrn28_2 --method=fedanchor --lanes=4 --part=step

Nothing is run; every figure is the compiler's. Milliseconds and shares of a chip's peak are ESTIMATES: the sum of the
cycle counts by which the TPU compiler schedules, divided by the chip's clock. They are not measurements. For a GPU
there is no such estimate, only the program's text and its memory. Each program is compiled in its own process, because
a crash of the compiler ends the process. TPUs need the extra `accelerators` (libtpu), GPUs the extra `cuda12`.

Separate several values of an option by commas; every combination is compiled. Other configuration fields follow as on
the command line, for example --config.client.batch_size=20. The data are random images of CIFAR-10's shape. The
configuration is the library's default: 100 clients, 10 a round. Parts:

  step      the first phase of a cohort with one client per lane: start, steps and upload
  dispatch  a loop over rounds, with the configuration's cohort

`milliseconds_per_client` of a client's step is the estimate for a chip with all its lanes, divided by the number of
lanes.
"""

import argparse
import importlib.util
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # this library, from any working directory


class Target(NamedTuple):
    """An accelerator.

    Attributes:
        platform: `Machine.platform`.
        topologies: number of chips -> XLA's name of the topology.
        accelerator_type: value of TPU_ACCELERATOR_TYPE for libtpu; '' for a GPU.
        clock: clock in Hz, which converts estimated cycles to seconds.
        peak: peak bfloat16 operations per second of one chip.
        memory: bytes of memory of one chip.
    """

    platform: str
    topologies: dict[int, str]
    accelerator_type: str
    clock: float
    peak: float
    memory: float


# Peaks and memory are from the vendors' data sheets. A TPU's clock follows from its peak. A cycle has 2 x 128 x 128
# operations in each of 4 matrix units (v5e) or 8 (v5p, two cores), and 2 x 256 x 256 in each of 4 (v6e).
TARGETS = {
    "v5e": Target("tpu", {1: "v5e:1x1", 4: "v5e:2x2"}, "v5litepod-4", 1.5e9, 197e12, 16e9),
    "v6e": Target("tpu", {1: "v6e:1x1", 4: "v6e:2x2"}, "v6e-4", 1.75e9, 918e12, 32e9),
    "v5p": Target("tpu", {1: "v5p:1x1x1", 4: "v5p:2x2x1"}, "v5p-8", 1.75e9, 459e12, 95e9),
    "h100": Target("gpu", {1: "1x1x1"}, "", 1.98e9, 989e12, 80e9),
    "a100": Target("gpu", {1: "1x1x1"}, "", 1.41e9, 312e12, 40e9),
}
# XLA's GpuTargetConfigProto; `GPUS` has the fields that differ between GPUs. They are from XLA's own files.
GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  {fields}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "{name}"
"""
GPUS = {
    "h100": (
        "NVIDIA H100 80GB HBM3",
        "cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES } core_count: 132 "
        "fpus_per_core: 128 threads_per_core_limit: 2048 shared_memory_per_core: 233472 "
        "shared_memory_per_block_optin: 232448 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 "
        "clock_rate_ghz: 1.98 device_memory_size: 84942979072",
    ),
    "a100": (
        "NVIDIA A100-SXM4-40GB",
        "cuda_compute_capability { major: 8 } core_count: 108 fpus_per_core: 64 threads_per_core_limit: 2048 "
        "shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912 memory_bandwidth: 1555200000000 "
        "l2_cache_size: 41943040 clock_rate_ghz: 1.41 device_memory_size: 42331013120",
    ),
}
ESTIMATE = "times and shares are estimates of the compiler, no hardware stands behind them"


def missing(target: str) -> str:
    """Returns a message if the package that compiles for a target is not installed, else ''."""
    module, extra = {"tpu": ("libtpu", "accelerators"), "gpu": ("jax_cuda12_plugin", "cuda12")}[
        TARGETS[target].platform
    ]
    if importlib.util.find_spec(module) is not None:
        return ""
    return f"compiling for {target} takes {module}, which is not installed: pip install 'fedjax_ssl[{extra}]'"


def environment(target: str, folder: str) -> dict[str, str]:
    """Returns the environment for a process that compiles for a target; it must be set before JAX starts.

    Args:
        target: key of `TARGETS`.
        folder: for libtpu's lock and logs.
    """
    of_tpu = {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": TARGETS[target].accelerator_type,
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    own = {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TMPDIR": folder,
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    return {**os.environ, **own, **(of_tpu if TARGETS[target].platform == "tpu" else {})}


def machine_for(target: str, chips: int, lanes: int):
    """Returns the `Machine`, and a function from a pytree of arrays to its shapes on that machine's devices."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, SingleDeviceSharding

    from fedjax_ssl.base.devices import AXIS
    from fedjax_ssl.run.machine import Machine

    platform, name = TARGETS[target].platform, TARGETS[target].topologies[chips]
    if platform == "tpu":
        words = {"topology_name": name, **({"chips_per_host_bounds": (1, 1, 1)} if chips == 1 else {})}
        devices = topologies.get_topology_desc(platform="tpu", **words).devices
    else:
        described, fields = GPUS[target]
        text = GPU.format(name=described, fields=fields)
        devices = topologies.get_topology_desc(platform="cuda", target_config=text, topology=name).devices
    if len(devices) != chips:
        raise SystemExit(f"{target} with {chips} chips has {len(devices)} devices")
    mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,)) if chips > 1 else None
    place = SingleDeviceSharding(devices[0]) if mesh is None else None

    def shapes(tree):
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree)

    return Machine(platform, mesh, lanes, None), shapes


def lower(part: str, target: str, chips: int, lanes: int, experiment):
    """Traces and lowers a program for a target. The experiment must have been built before, on the CPU."""
    from fedjax_ssl.run.machine import use
    from fedjax_ssl.run.programs import lower_dispatch

    machine, shapes = machine_for(target, chips, lanes)
    names = ("data", "hidden_labels", "state_shape")
    experiment = experiment._replace(**{name: shapes(getattr(experiment, name)) for name in names})
    with use(machine):
        if part == "dispatch":
            return lower_dispatch(machine, [experiment])
        return lower_step(machine, shapes, experiment, lanes, chips)


def lower_step(machine, shapes, experiment, lanes: int, chips: int):
    """Lowers the first phase for `lanes` clients on each chip, without the computation in `prepare`."""
    import jax
    import jax.numpy as jnp

    from fedjax_ssl.engine.lanes import JobTable, Source, run_in_lanes
    from fedjax_ssl.engine.tracing import one_job

    phase, number = experiment.method.phases[0], lanes * chips

    def prepared(state, data):
        _, broadcast, cohort = one_job(experiment.problem, experiment.method, state, data)
        jobs = phase.prepare(broadcast, data, cohort, None)
        own = {**cohort.own, **jobs.own}
        keys, takes_part = jax.random.split(cohort.key, 1), jnp.ones(1, bool)
        return broadcast, JobTable(keys, jobs.num_steps, takes_part, jobs.work, own)

    broadcast, table = jax.eval_shape(prepared, experiment.state_shape, experiment.data)
    table = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, number, *leaf.shape[1:]), leaf.dtype), table)

    @jax.named_scope("train")
    def train(broadcast, data, table):
        return run_in_lanes(lambda data: phase, Source(broadcast, data, None), table, lanes)

    # Results stay where they are.
    whole = {} if machine.mesh is None else {"in_shardings": jax.sharding.PartitionSpec()}
    return jax.jit(train, **whole).lower(shapes(broadcast), experiment.data, shapes(table))


# --- Reading the compiled text. ---------------------------------------------------------------------------------------

STEPS = re.compile(r"train/(?:shard_map/)?while/body/while$")  # the loop of `engine/lanes.py`


def describe(compiled, target: str, lanes: int, table) -> dict:
    """Returns what the compiler says about a program.

    Args:
        compiled: the compiled program.
        target: key of `TARGETS`.
        lanes: number of lanes on each chip.
        table: the training inputs, [N, ...].
    """
    import collections

    import hlo

    from fedjax_ssl.run.observe.profiling import STAGES

    program, memory = hlo.Program(compiled.as_text()), compiled.memory_analysis()
    found = {
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes,
        "image_table_bytes": hlo.size(table.shape) * table.dtype.itemsize,
        "image_table_copies": len(program.copies_of({"uint8": "u8", "float32": "f32"}[str(table.dtype)], table.shape)),
        "collectives": program.collectives(),
        "convolutions": program.convolutions(),
        "convolutions_of_a_step": {},
        "milliseconds_per_client": None,
        "milliseconds_by_stage": {},
    }
    milliseconds = 1e3 / TARGETS[target].clock
    by_stage, of_a_step = collections.Counter(), 0
    stage = re.compile(rf"(?:^|[/(])({'|'.join(STAGES)})(?=[/)]|$)")
    for instruction, times in program.walk():
        by_stage[instruction.attribute(stage.pattern, "the rest")] += instruction.cycles * times
        if instruction.opcode == "while" and STEPS.search(instruction.op_name):
            body = instruction.attribute(r"body=%?([\w.\-]+)")
            for kind, number in program.convolutions(body).items():
                steps = found["convolutions_of_a_step"]
                steps[kind] = steps.get(kind, 0) + number
            of_a_step += sum(one.cycles * trips for one, trips in program.walk(body))
    if sum(by_stage.values()):
        found["milliseconds_per_client"] = milliseconds / lanes * of_a_step
        found["milliseconds_by_stage"] = {name: milliseconds * cycles for name, cycles in by_stage.most_common()}
    return found


# --- One process per program. -----------------------------------------------------------------------------------------


def experiment_for(options: dict):
    """Builds the experiment of a run on random images."""
    from fedjax_ssl import base_config
    from fedjax_ssl.config import apply_arguments
    from fedjax_ssl.config.load import override
    from fedjax_ssl.run.experiment import build_experiment
    from fedjax_ssl.run.validation import validate

    config = base_config()
    config.data.source, config.data.path, config.data.flip = "npz", options["images"], True
    config = apply_arguments(config, ",".join(filter(None, (options["method"], options["model"], options["words"]))))
    config.model.dtype = options["dtype"]
    config = override(config, options["fields"])
    validate(config)
    return build_experiment(config)


def compile_one(options: dict) -> dict:
    """Compiles one program in this process and describes it."""
    import time

    from fedjax_ssl.base.devices import use_platform
    from fedjax_ssl.run.observe.profiling import step_flops

    with use_platform(TARGETS[options["target"]].platform):
        experiment = experiment_for(options)
    if not experiment.method.phases:
        raise SystemExit(f"{options['method']} trains no clients")
    target, lanes = options["target"], options["lanes"]
    started = time.process_time()
    lowered = lower(options["part"], target, options["chips"], lanes, experiment)
    traced = time.process_time()
    compiled = lowered.compile()
    seconds = {"trace_cpu_seconds": traced - started, "compile_cpu_seconds": time.process_time() - traced}
    found = describe(compiled, target, lanes, experiment.data.inputs)
    flops = step_flops(experiment, experiment.state_shape)
    each = found["milliseconds_per_client"]
    counted = options["part"] == "step" or len(experiment.method.phases) == 1  # `flops` counts the first phase only
    share = None if each is None or not counted else flops / (each / 1e3) / TARGETS[target].peak
    return {
        **seconds,
        **found,
        "flops_of_a_step": flops,
        "share_of_peak": share,
        "share_of_memory": found["peak_bytes"] / TARGETS[target].memory,
    }


def compile_apart(options: dict, folder: str) -> dict:
    """Runs `compile_one` in its own process; returns {'failed': reason} if that fails."""
    out = pathlib.Path(folder) / "program.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--compile", json.dumps(options), f"--json={out}"]
    done = subprocess.run(command, env=environment(options["target"], folder), capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(out.read_text())
    if done.returncode < 0:
        return {"failed": f"the compiler crashed, signal {-done.returncode}"}
    return {"failed": (done.stderr.strip().splitlines() or ["no words"])[-1][:300]}


def text_of(row: dict) -> str:
    """Formats a program's figures as text."""
    title = "{method}, {model} in {dtype}, {lanes} lanes on each of {chips} {target}, {part}".format(**row)
    if "failed" in row:
        return f"{title}\n  FAILED: {row['failed']}"
    lines = [
        title,
        f"  compiling {row['compile_cpu_seconds']:.0f} CPU-s; arguments {row['argument_bytes'] / 1e6:.0f} MB, "
        f"temporaries {row['temporary_bytes'] / 1e6:.0f} MB, peak {row['peak_bytes'] / 1e6:.0f} MB "
        f"({100 * row['share_of_memory']:.1f} % of the chip's); copies of the image table: {row['image_table_copies']}",
    ]
    if row["milliseconds_per_client"] is not None:
        lines.append(
            f"  ESTIMATE of the compiler: {row['milliseconds_per_client']:.3g} ms for a client's step, "
            f"{100 * row['share_of_peak']:.2g} % of the chip's peak"
        )
    entries = row["milliseconds_by_stage"]
    total = sum(entries.values()) or 1
    words = ", ".join(f"{key} {100 * value / total:.0f} %" for key, value in entries.items() if value > 0.005 * total)
    lines += [f"  estimated by stage, unknown loops once: {words}"] if words else []
    for name in ("convolutions_of_a_step", "convolutions"):
        lines.append(f"  {name.replace('_', ' ')}: " + ", ".join(f"{n} {kind}" for kind, n in row[name].items()))
    lines += [f"  {kind}: {entry['number']}, {entry['megabytes']:.3g} MB" for kind, entry in row["collectives"].items()]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=",".join(TARGETS))
    parser.add_argument("--chips", default="1,4", help="of a TPU; a GPU is one")
    parser.add_argument("--model", default="cnn,resnet18,wrn28_2")
    parser.add_argument("--method", default="fedanchor")
    parser.add_argument("--words", default="", help="recipes, variants and more, as after a configuration's colon")
    parser.add_argument("--lanes", default="1,4,10", help="on each chip")
    parser.add_argument("--part", default="step,dispatch")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--json", help="a file for the figures: those of the program, or a list")
    parser.add_argument("--compile", help=argparse.SUPPRESS)  # used by `compile_apart`: compile in this process
    options, fields = parser.parse_known_args(arguments)
    if options.compile:
        pathlib.Path(options.json).write_text(json.dumps(compile_one(json.loads(options.compile))))
        return 0
    names, shared = ("target", "chips", "model", "method", "lanes", "part"), ("dtype", "words")
    rows = [dict(zip(names, values)) for values in itertools.product(*(vars(options)[n].split(",") for n in names))]
    unknown = [row["target"] for row in rows if row["target"] not in TARGETS]
    unknown += [row["part"] for row in rows if row["part"] not in ("step", "dispatch")]
    if unknown:
        print(f"error: unknown: {unknown[0]}; targets: {', '.join(TARGETS)}; parts: step, dispatch", file=sys.stderr)
        return 2
    rows = [
        {**row, "chips": int(row["chips"]), "lanes": int(row["lanes"]), **{n: vars(options)[n] for n in shared}}
        for row in rows
    ]
    rows = [row for row in rows if row["chips"] in TARGETS[row["target"]].topologies]
    for line in sorted({missing(row["target"]) for row in rows} - {""}):
        print(f"error: {line}", file=sys.stderr)
        return 2
    from harness import random_npz

    with tempfile.TemporaryDirectory() as folder:
        path = random_npz(pathlib.Path(folder) / "images.npz")
        for row in rows:
            row |= compile_apart({**row, "images": path, "fields": fields}, folder)
            print(text_of(row), flush=True)
            if options.json:
                whole = (
                    rows[0]
                    if len(rows) == 1
                    else {"note": ESTIMATE, "programs": [r for r in rows if "peak_bytes" in r or "failed" in r]}
                )
                pathlib.Path(options.json).write_text(json.dumps({"note": ESTIMATE, **whole}, indent=2) + "\n")
    if len(rows) > 1:
        print(f"\n{ESTIMATE}.")
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
