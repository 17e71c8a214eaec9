"""Compares rounds on all cores of a processor with rounds on one core, for several choices of devices.

    python benchmarks/cores.py --out=cores.json
    python benchmarks/cores.py --model=wrn28_2 --clients=4 --images=50 --repeats=3

Times whole rounds of FedAnchor on random images of CIFAR-10's shape. The threshold is below all cosines, so every image
is trained on and the work is known. Each row has its own process, because devices and kernels are fixed when JAX
starts. The processes take turns, with --rounds rounds per dispatch, as in a run. Except in the last row, only one
process works at a time:

    one core                     a single device, held to one core
    one device                   a single device whose operations are split over all cores: JAX's default
    a device for each core       clients, labelling, statistics and evaluation are split over the devices
    the same, plain kernels      and each operation stays on one core (XLA_FLAGS=--xla_cpu_multi_thread_eigen=false)
    a process for each core      the machine's limit: the first row's process on every core at once, each with a whole
                                 round of its own; the seconds of the last one divided by their number

Prints `cores NAME X`, the median over the turns of one core's seconds divided by the row's.
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from fedjax_ssl.run.cores import ONE_THREAD, PLAIN_LOOPS

NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
ALL, EACH = range(NUM_CORES), [[core] for core in range(NUM_CORES)]
ANCHORS = 40  # labelled images of the server
KINDS = {  # name -> the cores of each of its processes, their devices, XLA's flags
    "one core": (EACH[:1], 1, ""),
    "one device": ([ALL], 1, ""),
    "a device for each core": ([ALL], NUM_CORES, ""),
    "the same, plain kernels": ([ALL], NUM_CORES, ONE_THREAD),
    "a process for each core": (EACH, 1, ""),
}


def work(fields: dict, cores: list[int], devices: int, rounds: int) -> None:
    """Compiles in one process, reports this, and answers each line of its input with the seconds of a round."""
    if hasattr(os, "sched_setaffinity"):
        mine = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, [mine[core] for core in cores])
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    from fedjax_ssl import base_config
    from fedjax_ssl.config import apply_arguments
    from fedjax_ssl.run.experiment import build_experiment
    from fedjax_ssl.run.machine import use_machine
    from fedjax_ssl.run.programs import compile_dispatch

    config = apply_arguments(base_config(), "strong")
    config.update_from_flattened_dict(fields)
    with use_machine(config) as machine:
        experiment = build_experiment(config)
        state = machine.put(experiment.init(experiment.data))
        data, hidden, count = machine.put((experiment.data, experiment.hidden_labels, jax.numpy.int32(rounds)))
        dispatch = compile_dispatch(machine, experiment)
        print("ready", flush=True)
        for _ in sys.stdin:
            started = time.perf_counter()
            state = jax.block_until_ready(dispatch(state, data, hidden, count)).state
            print((time.perf_counter() - started) / rounds, flush=True)


def start(kind: str, fields: dict, rounds: int) -> list[subprocess.Popen]:
    """Starts a row's processes; returns them compiled and after their first round."""
    cores_of_each, devices, flags = KINDS[kind]
    given = os.environ.get("XLA_FLAGS", "")
    environment = {**os.environ, "XLA_FLAGS": f"{PLAIN_LOOPS} {flags} {given}".strip()}  # the last flag counts
    processes = []
    for cores in cores_of_each:  # in turn, because compiling uses all cores
        command = [sys.executable, __file__, f"--work={json.dumps([fields, list(cores), devices, rounds])}"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        if process.stdout.readline().strip() != "ready":
            raise SystemExit(f"{kind}: the process ended with status {process.wait()}")
        seconds_of_a_round([process])
        processes.append(process)
    return processes


def seconds_of_a_round(processes: list[subprocess.Popen]) -> float:
    """Seconds per round if all processes run a round at once."""
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    return max(float(process.stdout.readline()) for process in processes) / len(processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--images", type=int, default=100, help="of each client")
    parser.add_argument("--rounds", type=int, default=5, help="in one dispatch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", default="cores.json")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return

    from harness import describe, random_npz, write

    fields = {
        "num_clients": options.clients, "clients_per_round": options.clients, "client.epochs": 1,
        "data.source": "npz", "data.flip": True, "data.partition": "iid", "data.server_labels": ANCHORS,
        "data.examples_per_client": options.images, "server.pretrain_epochs": 0, "model.name": options.model,
        "confidence.threshold": -2.0,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        size = options.clients * options.images + ANCHORS
        fields["data.path"] = random_npz(pathlib.Path(folder) / "images.npz", size, 1000)
        processes = {kind: start(kind, fields, options.rounds) for kind in KINDS}
        times = {kind: [] for kind in KINDS}
        for _ in range(options.repeats):
            for kind in KINDS:
                times[kind].append(seconds_of_a_round(processes[kind]))
        for process in itertools.chain.from_iterable(processes.values()):
            process.communicate()
    table = []
    for kind, seconds in times.items():
        ratio = statistics.median(one / mine for one, mine in zip(times["one core"], seconds))
        print(f"cores {kind} {ratio:.3f}")
        table.append({"devices": kind, "round, s": statistics.median(seconds), "one core / this": ratio})
    write(options.out, {**describe(), "model": options.model}, table)


if __name__ == "__main__":
    main()
