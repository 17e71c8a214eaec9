"""Compares a round of FedAvg with the simulators that a user could take instead; prints `ratio WORK PEER X`.

    python benchmarks/simulators.py --work=pfl --repeats=3 --out=simulators.json

Sides: this library's `train`; a plain PyTorch loop in as many processes as cores; pfl-research 0.6.0 (torchrun, as many
processes); Flower 1.42 (Ray, one core for each client); FedJAX 0.0.17 with JAX 0.5.3, the newest that it runs on; fluke
0.8.1. A peer gets an environment of its own, made below --environments when it is first needed.

`pfl` is pfl-research's CIFAR-10 benchmark, 1,000 clients of 50 images, 50 a round, batches of 10, SGD at 0.1, its
CNN (without dropout, whose random numbers differ between libraries), tested on 10,000 images in every tenth round.
`large_clients` has the same images in 100 clients of 500, 10 a round.

Before anything is timed, all sides train two rounds of 4 clients, each of whose images are one batch, from equal
weights; the weights must then agree. The sides run in turn; a ratio is the median over the repeats of our seconds of a
round over theirs. Memory is the largest sum of the proportional set sizes of a side's processes.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import simulator_peers
from simulator_peers import CORES, EVERY, RATE, save

TORCH = "torch==2.13.0"
PEERS = {
    "loop": (TORCH, "numpy"),
    "pfl": (TORCH, "pfl[pytorch]==0.6.0"),
    "flower": (TORCH, "flwr[simulation]==1.42.0"),
    "fedjax": ("fedjax==0.0.17", "jax==0.5.3", "jaxlib==0.5.3"),
    "fluke": ("fluke-fl==0.8.1",),
}
WORKS = {
    "pfl": {"clients": 1000, "images": 50, "cohort": 50, "batch": 10, "tests": 10_000},
    "large_clients": {"clients": 100, "images": 500, "cohort": 10, "batch": 10, "tests": 10_000},
    "check": {"clients": 4, "images": 50, "cohort": 4, "batch": 50, "tests": 100},
}


def ours(work, rounds, folder):
    """This library's side, see `simulator_peers`."""
    from fedjax_ssl import train
    from fedjax_ssl.run.observe.listeners import WriteRecords

    ends, write = [], WriteRecords.take

    def take(self, turn):
        ends.extend([time.monotonic()] * (turn.done - len(ends)))  # a dispatch ends several rounds at once
        write(self, turn)

    WriteRecords.take = take
    config = our_config(work)
    config.num_rounds = rounds
    with tempfile.TemporaryDirectory() as runs:
        state = train(config, pathlib.Path(runs) / "run")
    return to_arrays(state.model.params), ends


def our_config(work):
    """FedAvg on all labels, without augmentation, as a user would set it."""
    from fedjax_ssl import base_config, use_every_core
    from fedjax_ssl.config import apply_arguments

    use_every_core()
    config = apply_arguments(base_config(), "supervised,all_labels")
    config.num_clients, config.clients_per_round, config.eval_every = len(work["rows"]), int(work["cohort"]), EVERY
    config.data.update({"source": "npz", "path": str(work["npz"]), "normalisation": "none"})
    config.data.update({"labels": "clients", "partition": "iid"})
    config.model.update({"name": f"{__file__}:OurNetwork", "normalisation": "none"})
    config.client.update({"epochs": 1, "batch_size": int(work["batch"]), "learning_rate": RATE, "momentum": 0.0})
    config.client.update({"weight_decay": 0.0, "clip_norm": 0.0})
    config.augment.update({"flip": "never", "padding": 0, "flavour": "none"})
    config.schedule, config.log.report = "constant", False
    return config


def __getattr__(name):
    """`OurNetwork`, which a user's file would define; the peers' environments have no Flax."""
    if name != "OurNetwork":
        raise AttributeError(name)
    import flax.linen as nn

    class OurNetwork(nn.Module):
        @nn.compact
        def __call__(self, images):
            x = nn.relu(nn.Conv(32, (3, 3), padding="VALID", name="conv0")(images))
            x = nn.relu(nn.Conv(64, (3, 3), padding="VALID", name="conv1")(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
            return nn.relu(nn.Dense(128, name="dense")(x.reshape(len(x), -1)))

    return OurNetwork


def to_arrays(params):
    layers = {**params["backbone"], "classifier": params["classifier"]}
    return {f"{layer}.{leaf}": np.asarray(value) for layer, leaves in layers.items() for leaf, value in leaves.items()}


# --- The benchmark. ---------------------------------------------------------------------------------------------------


def prepare(name, folder):
    """Writes a work into a folder: random images, the rows of each client, and our initial weights."""
    size, rng = WORKS[name], np.random.default_rng(0)
    number = size["clients"] * size["images"]
    arrays = {"x_train": rng.integers(0, 256, (number, 32, 32, 3), np.uint8), "y_train": np.arange(number) % 10}
    arrays |= {"x_test": rng.integers(0, 256, (size["tests"], 32, 32, 3), np.uint8)}
    arrays |= {"y_test": np.arange(size["tests"]) % 10}
    np.savez(folder / "images.npz", **arrays)
    work = {**arrays, "npz": folder / "images.npz", "cohort": size["cohort"], "batch": size["batch"]}
    work["rows"] = np.empty((size["clients"], 0))
    from fedjax_ssl.run.experiment import build_experiment

    experiment = build_experiment(our_config(work))
    work["rows"] = np.asarray(experiment.data.client_index)
    weights = to_arrays(experiment.init(experiment.data, None).model.params)
    np.savez(folder / "work.npz", **weights, **{key: np.asarray(value) for key, value in work.items() if key != "npz"})


def python_of(side, environments):
    """The interpreter of a side; makes the peer's environment if there is none."""
    if side == "ours":
        return sys.executable
    folder = environments / side
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PEERS[side]], check=True)
        (folder / "made").touch()
    return python


def run_side(side, rounds, folder, environments):
    """Trains one side in processes of its own; returns (weights, seconds of a round, MB)."""
    for name in ("weights.npz", "ends.json", "rendezvous"):
        (folder / name).unlink(missing_ok=True)
    command = [python_of(side, environments)]
    if side == "pfl":
        command += ["-m", "torch.distributed.run", f"--nproc_per_node={CORES}"]
    command += [__file__, f"--side={side}", f"--rounds={rounds}", f"--folder={folder}"]
    with open(folder / f"{side}.log", "w") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0", "PYTHONPATH": ""}
        if side == "ours":
            environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, memory_of(process.pid))
            time.sleep(5)  # reading the sizes of large processes costs a tenth of a second
    if process.returncode:
        sys.exit(f"{side} ended with status {process.returncode}; see {folder / f'{side}.log'}")
    ends = json.loads((folder / "ends.json").read_text())
    return dict(np.load(folder / "weights.npz")), ends, peak


def seconds_of_a_round(ends):
    """Mean over the rounds after the tenth; programs are compiled before."""
    return (ends[-1] - ends[EVERY - 1]) / (len(ends) - EVERY)


def memory_of(process):
    """MB of a process and its children: their proportional set sizes."""
    folder, total = pathlib.Path(f"/proc/{process}"), 0.0
    try:
        lines = (folder / "smaps_rollup").read_text().splitlines()
        total = next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1000
        children = [child for task in (folder / "task").iterdir() for child in (task / "children").read_text().split()]
    except (OSError, StopIteration):  # it has ended meanwhile
        return total
    return total + sum(map(memory_of, children))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="pfl", choices=[name for name in WORKS if name != "check"])
    parser.add_argument("--sides", default=",".join(("ours", *PEERS)))
    parser.add_argument("--rounds", type=int, default=30, help=f"{EVERY} are not timed; a multiple of it, above it")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--environments", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir(), "simulators"))
    parser.add_argument("--out", default="simulators.json")
    parser.add_argument("--side", help="trains this side alone, inside its environment")
    parser.add_argument("--folder", type=pathlib.Path)
    options = parser.parse_args()
    if options.side:
        arrays = np.load(options.folder / "work.npz")  # our side reads its images from the other file, as a user's run
        names = ("rows", "cohort", "batch") if options.side == "ours" else arrays.files
        work = {**{name: arrays[name] for name in names}, "npz": options.folder / "images.npz"}
        side = ours if options.side == "ours" else getattr(simulator_peers, options.side)
        weights, ends = side(work, options.rounds, options.folder)
        if weights is not None:
            save(options.folder, weights, ends)
        return
    compare(options)


def compare(options):
    from harness import describe, write

    sides, times, memory = options.sides.split(","), {}, {}
    with tempfile.TemporaryDirectory() as check, tempfile.TemporaryDirectory() as folder:
        check, folder = pathlib.Path(check), pathlib.Path(folder)
        prepare("check", check)
        weights = {side: run_side(side, 2, check, options.environments)[0] for side in sides}
        apart = {side: max(float(np.abs(own[name] - weights[sides[0]][name]).max()) for name in own)
                 for side, own in weights.items()}  # fmt: skip
        print(f"largest difference of a weight from {sides[0]}'s after two rounds: {apart}", flush=True)
        assert max(apart.values()) < 1e-4, "the sides do not do the same work"
        prepare(options.work, folder)
        for _ in range(options.repeats):
            for side in sides:
                _, ends, peak = run_side(side, options.rounds, folder, options.environments)
                times.setdefault(side, []).append(seconds_of_a_round(ends))
                memory[side] = max(peak, memory.get(side, 0.0))
                print(f"{side} {times[side][-1]:.3f} s a round, {peak:.0f} MB", flush=True)
    rows = []
    for side in sides:
        ratio = statistics.median(o / t for o, t in zip(times[sides[0]], times[side]))
        print(f"ratio {options.work} {side} {ratio:.3f}", flush=True)
        row = {"side": side, "s a round": statistics.median(times[side]), "ours over it": ratio}
        rows.append(row | {"MB": memory[side], "weights apart": apart[side]})
    write(options.out, describe(), rows)


if __name__ == "__main__":
    main()
