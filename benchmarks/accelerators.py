"""Compiles a run's program for a TPU or a GPU that is not present, and reports what the compiler says about it.

    python benchmarks/accelerators.py --target=v5e --chips=1 --model=wrn28_2 --method=fedanchor --lanes=4 --part=step

Nothing is run; every figure is the compiler's. Milliseconds and shares of a chip's peak are ESTIMATES: the sum of the
cycle counts by which the TPU compiler schedules, divided by the chip's clock. They are not measurements. For a GPU
there is no such estimate, only the program's text and its memory. A crash of the compiler ends the process. TPUs need
the extra `accelerators` (libtpu), GPUs the extra `cuda12`.

The data are random images of CIFAR-10's shape. The configuration is the library's default: 100 clients, 10 a round;
other fields follow as on the command line, for example --config.client.batch_size=20. Parts:

  step      the first phase of a cohort with one client per lane: start, steps and upload
  dispatch  a loop over rounds, with the configuration's cohort

`milliseconds_per_client` of a client's step is the estimate for a chip with all its lanes, divided by the number of
lanes.
"""

import argparse
import collections
import importlib.util
import json
import os
import pathlib
import re
import sys
import tempfile
import time
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # this library, from any working directory

import hlo


class Target(NamedTuple):
    """An accelerator."""

    platform: str  # `Machine.platform`
    topologies: dict[int, str]  # number of chips -> XLA's name of the topology
    clock: float  # in Hz, which converts estimated cycles to seconds
    peak: float  # bfloat16 operations per second of one chip
    memory: float  # bytes of one chip


# Peaks and memory are from the vendors' data sheets. A TPU's clock follows from its peak: a cycle has 2 x 128 x 128
# operations in each of 4 matrix units.
TARGETS = {
    "v5e": Target("tpu", {1: "v5e:1x1", 4: "v5e:2x2"}, 1.5e9, 197e12, 16e9),
    "h100": Target("gpu", {1: "1x1x1"}, 1.98e9, 989e12, 80e9),
}
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES } core_count: 132 fpus_per_core: 128
  threads_per_core_limit: 2048 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""  # XLA's GpuTargetConfigProto, with the numbers of XLA's own files


def missing(target: str) -> str:
    """Returns a message if the package that compiles for a target is not installed, else ''."""
    packages = {"tpu": ("libtpu", "accelerators"), "gpu": ("jax_cuda12_plugin", "cuda12")}
    module, extra = packages[TARGETS[target].platform]
    if importlib.util.find_spec(module) is not None:
        return ""
    return f"compiling for {target} takes {module}, which is not installed: pip install 'fedjax_ssl[{extra}]'"


def environment(target: str, folder: str) -> dict[str, str]:
    """Variables of a process that compiles for a target, to be set before JAX starts; libtpu writes into the folder."""
    of_tpu = {
        "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }  # fmt: skip
    own = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false", "TMPDIR": folder}
    return {**own, **(of_tpu if TARGETS[target].platform == "tpu" else {})}


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
        devices = topologies.get_topology_desc(platform="cuda", target_config=H100, topology=name).devices
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
    """Lowers the first phase for `lanes` clients on each chip, without labelling and the computation in `prepare`."""
    import jax
    import jax.numpy as jnp

    from fedjax_ssl.engine.lanes import JobTable, Source, run_in_lanes
    from fedjax_ssl.engine.tracing import one_job

    (phase, *later), number = experiment.method.phases, lanes * chips
    label = None if later else experiment.method.label  # labels are made before the last phase

    def prepared(state, data):
        _, broadcast, cohort = one_job(experiment.problem, experiment.method, state, data)
        labels = label and label(broadcast, data, cohort, None)
        jobs = phase.prepare(broadcast, data, cohort._replace(labels=labels), None)
        own = {**cohort.own, **(labels.own if labels else {}), **jobs.own}
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
    """What the compiler says about a program for a key of `TARGETS`; `table` has the training inputs, [N, ...]."""
    from fedjax_ssl.run.observe.profiling import STAGES

    program, memory = hlo.Program(compiled.as_text()), compiled.memory_analysis()
    found = {
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes,
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


def compile_one(options, images: str) -> dict:
    """Compiles a run's program on these images and describes it."""
    from fedjax_ssl import base_config
    from fedjax_ssl.base.devices import use_platform
    from fedjax_ssl.config import apply_arguments
    from fedjax_ssl.config.load import override
    from fedjax_ssl.run.experiment import build_experiment
    from fedjax_ssl.run.observe.profiling import step_flops
    from fedjax_ssl.run.validation import validate

    config = base_config()
    config.data.source, config.data.path, config.data.flip = "npz", images, True
    config = apply_arguments(config, ",".join((options.method, options.model, options.words)))
    config.model.dtype = options.dtype
    config = override(config, options.fields)
    validate(config)
    with use_platform(TARGETS[options.target].platform):
        experiment = build_experiment(config)
    if not experiment.method.phases:
        raise SystemExit(f"{options.method} trains no clients")
    started = time.process_time()
    lowered = lower(options.part, options.target, options.chips, options.lanes, experiment)
    traced = time.process_time()
    compiled = lowered.compile()
    seconds = {"trace_cpu_seconds": traced - started, "compile_cpu_seconds": time.process_time() - traced}
    found = {**seconds, **describe(compiled, options.target, options.lanes, experiment.data.inputs)}
    found["share_of_memory"] = found["peak_bytes"] / TARGETS[options.target].memory
    # Of the first phase, as is the number of operations.
    if (each := found["milliseconds_per_client"]) and (options.part == "step" or len(experiment.method.phases) == 1):
        flops = step_flops(experiment, experiment.state_shape)
        found["share_of_peak"] = flops / (each / 1e3) / TARGETS[options.target].peak
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="v5e", choices=TARGETS)
    parser.add_argument("--chips", type=int, default=1, choices=(1, 4), help="of a TPU; a GPU is one")
    parser.add_argument("--model", default="wrn28_2")
    parser.add_argument("--method", default="fedanchor")
    parser.add_argument("--words", default="", help="recipes, variants and more, as after a configuration's colon")
    parser.add_argument("--lanes", type=int, default=4, help="on each chip")
    parser.add_argument("--part", default="step", choices=("step", "dispatch"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--out", default="accelerators.json")
    options, options.fields = parser.parse_known_args()
    if words := missing(options.target):
        parser.error(words)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(environment(options.target, folder))
        from harness import random_npz  # imports JAX

        found = compile_one(options, random_npz(pathlib.Path(folder) / "images.npz"))
    text = json.dumps({**vars(options), **found}, indent=2)
    pathlib.Path(options.out).write_text(text + "\n")
    print(f"{text}\ntimes and shares are estimates of the compiler, no hardware stands behind them")


if __name__ == "__main__":
    main()
