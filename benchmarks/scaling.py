"""Measures how a round's time grows with clients, examples and the federation, and how well lanes are filled.

    python benchmarks/scaling.py --out=scaling.json                    # all four parts
    python benchmarks/scaling.py --parts=lanes                         # counts, no clock: about a minute
    python benchmarks/scaling.py --parts=clients,federation --repeats=9

Times whole rounds of FedAnchor: the small CNN on random images of 28x28x1, one local epoch in batches of 10, 50 images
at the server, 100 test images. The threshold is below all cosines, so all images are trained on and the work is known.
All points of a sweep are timed in turn in one process; a time is the median over the repeats.

clients     Seconds of a round against the clients of a round (each with --images images) and against the images of each
            client (in a cohort of --cohort), in a federation of 100 clients. Fits a + b * local steps to each sweep
            with the least relative error; prints `scaling clients X` and `scaling images X`, the largest relative
            deviation from this line. On backends whose default is a lane for each client of the cohort, the clients'
            sweep measures the cost of a step of many lanes, which need not be a line; --lanes sets one number for all
            points.

federation  The same round against the number of clients in the federation, --federation, with a cohort of 10 and 100
            images per client, drawn with repetition from the same 10,000. Time: prints `scaling federation X`, the
            largest deviation of the round's time from that of the first size, as the median of the repeats' ratios.
            Memory: each size compiles and runs two rounds in a new process; prints `scaling memory X`, the largest
            deviation from the first size, be it of the process's peak resident set (mostly the compiler's, and on a GPU
            the driver's) or of the device's peak_bytes_in_use, if reported. 'planned' is the compiler's figure for the
            round alone: arguments, including the clients' table (four bytes per image of a client), results and
            temporaries.

lanes       Useful steps divided by all steps of the lanes, including idle ones, as counted by the engine
            (`train_cohort`, with steps that do nothing) over many rounds, for each number of lanes. Prints `scaling
            lanes L X`. Job lengths: 50,000 labels of 10 balanced classes, minus 500 at the server, the rest in LDA
            shares of alpha 0.1 over 100 clients (`fedjax_ssl.data.make_partition`); cohorts of 10, five local epochs in
            batches of 10. Which examples qualify is ASSUMED, not trained: in each round every class c has a share q_c ~
            Beta(s, s), and each example of the class qualifies with that probability. A client's share then follows
            from its classes, few at alpha 0.1, and changes between rounds. `scaling lanes` reports s = 1 (uniform
            shares); --spreads adds 0.3 (most classes near none or near all), with more short jobs, and 5 (shares near
            one half), with more equal jobs. 'bound' is the limit for any schedule that keeps a job in one lane: all
            useful steps divided by L times the larger of the mean load and the longest job. L = 10 is the plain `vmap`.

partitions  CPU seconds to deal five labels of 10 balanced classes to each of --partitioned clients, by every partition.
            `dirichlet_clients`, which promises each client ten examples and often cannot with many clients, has a
            hundredth of them, at most 1,000. Prints `scaling partitions X`, the slowest. Then the times to save, read,
            check and count the last partition.
"""

import argparse
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from harness import describe, random_federation, seconds_of, write_tables

from fedjax_ssl import base_config
from fedjax_ssl.augment import strong_augment, weak_augment
from fedjax_ssl.data import PARTITIONS, load_partition, make_partition, save_partition
from fedjax_ssl.data.owners import class_counts as count_classes
from fedjax_ssl.engine.cohort import train_cohort
from fedjax_ssl.engine.interface import Cohort, Finished, Jobs, Phase, Problem
from fedjax_ssl.engine.round import init_key, make_round
from fedjax_ssl.kinds import Images
from fedjax_ssl.methods import METHODS
from fedjax_ssl.models import build_model
from fedjax_ssl.models.network import Network
from fedjax_ssl.records.manifest import partition_sum
from fedjax_ssl.run.machine import find_machine

IMAGE_SHAPE = (28, 28, 1)
CLASSES, ANCHORS, TEST_IMAGES, BATCH_SIZE = 10, 50, 100, 10
FEDERATION_IMAGES, FEDERATION_COHORT, FEDERATION_EACH = 10_000, 10, 100
LABELS, LANES_CLIENTS, LANES_COHORT, LANES_EPOCHS = 50_000, 100, 10, 5
REPORTED_SPREAD = 1.0


# --- Whole rounds. ----------------------------------------------------------------------------------------------------


class CompiledRound(NamedTuple):
    """A round that is ready to be timed.

    Attributes:
        run: runs the first round, without arguments; returns the state and a `RoundResult`.
        lanes: number of clients trained side by side.
        megabytes: the compiler's plan for it: arguments, results and temporaries.
    """

    run: Callable
    lanes: int
    megabytes: float


def round_of(num_clients: int, clients_per_round: int, images_each: int, num_images: int, lanes: int) -> CompiledRound:
    """A compiled round of FedAnchor in which every client trains on all its images.

    Args:
        num_clients: in the federation.
        clients_per_round: the cohort.
        images_each: images of every client, drawn with repetition from a table of `num_images`.
        num_images: see above.
        lanes: 0 takes the backend's default.
    """
    config = base_config()
    config.model.name = "cnn"
    config.num_clients, config.clients_per_round = num_clients, clients_per_round
    config.client.epochs, config.client.batch_size = 1, BATCH_SIZE
    config.server.pretrain_epochs = 0
    config.fedanchor.threshold = -1.0
    if lanes:
        config.lanes = lanes
    weak = functools.partial(weak_augment, flip=False, padding=config.augment.padding)
    strong = functools.partial(
        strong_augment,
        flip=False,
        padding=config.augment.padding,
        flavour=config.augment.flavour,
        num_ops=config.augment.num_ops,
        magnitude=config.augment.magnitude,
    )
    entry = METHODS[config.method]
    model = build_model(config.model, CLASSES, entry.heads_of(config))
    network = Network(model, Images(IMAGE_SHAPE, (0.5,), (0.25,)), config.model.normalisation)
    problem = Problem(config, network, weak, strong, CLASSES)
    method = entry.factory(problem)
    rows = np.random.default_rng(1).integers(0, num_images, (num_clients, images_each))
    data = random_federation(rows, num_images, IMAGE_SHAPE, CLASSES, ANCHORS, TEST_IMAGES)
    state = jax.jit(lambda data: method.init(data, init_key(data.seed)))(data)
    lanes = find_machine(config).lanes(config.clients_per_round)
    arguments = (state, data, data.visible_labels)
    # The result includes the state, because unused results would not be computed.
    round_fn = jax.jit(make_round(problem, method, lanes)).lower(*arguments).compile()
    run = functools.partial(round_fn, *arguments)
    plan = round_fn.memory_analysis()
    planned = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes

    expected = clients_per_round * -(-images_each // BATCH_SIZE)
    taken = int(run()[1].metrics["local_steps"])
    assert taken == expected, f"the round took {taken} local steps instead of {expected}: not every image qualified"
    return CompiledRound(run, lanes, planned / 1e6)


def line_through(work: list[float], seconds: list[float]) -> np.ndarray:
    """The values at `work` of the line a + b * work with the least squared relative distances from `seconds`."""
    work, seconds = np.array(work, float), np.array(seconds)
    design = np.stack([np.ones_like(work), work], axis=1)
    return design @ np.linalg.lstsq(design / seconds[:, None], np.ones_like(seconds), rcond=None)[0]


def clients_part(options) -> list[dict]:
    """Time against the clients of a round, and against the images of each."""
    cohorts, images = numbers(options.clients), numbers(options.examples)
    num_clients = max(100, *cohorts, options.cohort)
    sweeps = {
        "clients": [(cohort, options.images) for cohort in cohorts],
        "images": [(options.cohort, each) for each in images],
    }
    rows = []
    for sweep, points in sweeps.items():
        rounds = {point: round_of(num_clients, *point, 10_000, options.lanes) for point in points}
        times = seconds_of({point: compiled.run for point, compiled in rounds.items()}, options.repeats)
        steps = [cohort * -(-each // BATCH_SIZE) for cohort, each in points]
        seconds = [statistics.median(times[point]) for point in points]
        deviations = np.array(seconds) / line_through(steps, seconds) - 1
        print(f"scaling {sweep} {np.abs(deviations).max():.3f}", flush=True)
        rows += [
            {
                "sweep": sweep,
                "clients": point[0],
                "images each": point[1],
                "lanes": rounds[point].lanes,
                "local steps": step,
                "seconds": second,
                "ms per step": 1e3 * second / step,
                "off the line": float(deviation),
            }
            for point, step, second, deviation in zip(points, steps, seconds, deviations)
        ]
    return rows


# --- The federation's size. -------------------------------------------------------------------------------------------


def federation_round(num_clients: int, lanes: int) -> CompiledRound:
    """A round in a federation with this number of clients."""
    return round_of(num_clients, FEDERATION_COHORT, FEDERATION_EACH, FEDERATION_IMAGES, lanes)


def peak_memory(num_clients: int, lanes: int) -> dict[str, float | None]:
    """The peak MB of this process after two rounds: resident on the host, and in use on the device."""
    jax.block_until_ready(federation_round(num_clients, lanes).run())
    on_device = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    # Not getrusage: a process inherits its parent's peak.
    status = pathlib.Path("/proc/self/status").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    return {"resident, MB": resident * 1024 / 1e6, "device, MB": None if on_device is None else on_device / 1e6}


def memory_in_a_process_of_its_own(num_clients: int, lanes: int) -> dict[str, float | None]:
    """`peak_memory` in a new process."""
    command = [sys.executable, __file__, f"--memory_of={num_clients}", f"--lanes={lanes}"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(printed.splitlines()[-1])


def federation_part(options, memory: dict[int, dict]) -> list[dict]:
    """Time and memory of a round against the federation's size."""
    sizes = numbers(options.federation)
    rounds = {size: federation_round(size, options.lanes) for size in sizes}
    times = seconds_of({size: compiled.run for size, compiled in rounds.items()}, options.repeats)
    first = sizes[0]
    rows = []
    for size in sizes:
        row = {
            "federation": size,
            "seconds": statistics.median(times[size]),
            f"time / that of {first}": statistics.median(t / f for t, f in zip(times[size], times[first])),
        }
        for name, megabytes in memory[size].items():
            row[name] = megabytes
            row[f"{name} / that of {first}"] = megabytes and megabytes / memory[first][name]
        row["planned, MB"] = rounds[size].megabytes
        rows.append(row)
    ratios = {name: [row[name] for row in rows if row[name] is not None] for name in rows[0] if " / " in name}
    deviation = {name: max((abs(ratio - 1) for ratio in found), default=0.0) for name, found in ratios.items()}
    time_name, *memory_names = deviation
    print(f"scaling federation {deviation[time_name]:.3f}")
    print(f"scaling memory {max(deviation[name] for name in memory_names):.3f}", flush=True)
    return rows


# --- How well the lanes are filled. -----------------------------------------------------------------------------------


def class_counts(seed: int) -> np.ndarray:
    """Examples of each class at each client, [K, C]: FedAnchor's partition of labels like CIFAR-10's."""
    config = base_config().data
    config.server_labels, config.partition, config.alpha = 500, "lda", 0.1
    labels = np.random.default_rng(seed).permutation(np.arange(LABELS) % CLASSES)
    partition = make_partition(labels, CLASSES, config, LANES_CLIENTS, seed)
    return np.stack([np.bincount(labels[rows], minlength=CLASSES) for rows in partition.client_rows])


def draw_lengths(spread: float, num_rounds: int, seed: int) -> np.ndarray:
    """Local steps of each job of each round, int32 [T, M], under the assumption in the module's docstring."""
    counts, rng = class_counts(seed), np.random.default_rng([seed, 1])
    rounds = []
    for _ in range(num_rounds):
        cohort = rng.choice(LANES_CLIENTS, LANES_COHORT, replace=False)
        shares = rng.beta(spread, spread, CLASSES)
        qualified = rng.binomial(counts[cohort], shares).sum(axis=1)
        rounds.append(LANES_EPOCHS * -(-qualified // BATCH_SIZE))
    return np.array(rounds, np.int32)


def count_lane_steps(lengths: np.ndarray, lanes: int) -> np.ndarray:
    """Steps of all lanes in each round, [T], as counted by the engine, for jobs of `lengths` int [T, M]."""
    idle_phase = Phase(
        prepare=lambda broadcast, data, cohort, previous: Jobs(broadcast[cohort.clients], ()),
        start=lambda broadcast, data, work, own: jnp.int32(0),
        step=lambda broadcast, data, work, carry, index, key: carry + 1,
        finish=lambda broadcast, work, carry, num_steps: Finished(carry, {}, {}),
    )
    cohort = Cohort(jnp.arange(lengths.shape[1]), {}, jax.random.key(0))

    @jax.jit
    def count(lengths):
        def one_round(num_steps):
            result = train_cohort((idle_phase,), num_steps, None, cohort, lanes)
            return result.lane_steps, result.upload

        return jax.lax.map(one_round, lengths)

    lane_steps, steps_taken = count(jnp.asarray(lengths))
    np.testing.assert_array_equal(steps_taken, lengths)  # every job took exactly its steps
    return np.asarray(lane_steps)


def lanes_part(options) -> list[dict]:
    """Useful over all lane steps, for each number of lanes and each spread of the qualified shares."""
    spreads = list(dict.fromkeys([REPORTED_SPREAD, *map(float, options.spreads.split(","))]))
    rows = []
    for spread in spreads:
        lengths = np.concatenate([draw_lengths(spread, options.rounds, seed) for seed in range(options.seeds)])
        useful = lengths.sum(axis=1)
        for lanes in numbers(options.lane_counts):
            lane_steps = count_lane_steps(lengths, lanes)
            least = lanes * np.maximum(-(-useful // lanes), lengths.max(axis=1))
            there = useful > 0
            shares = useful[there] / lane_steps[there]
            row = {
                "lanes": lanes,
                "spread": spread,
                "rounds": len(lengths),
                "mean steps of a job": float(lengths.mean()),
                "longest / mean": float(np.mean(lengths.max(axis=1)[there] / lengths.mean(axis=1)[there])),
                "useful share": float(useful.sum() / lane_steps.sum()),
                "of a round, 5 %": float(np.quantile(shares, 0.05)),
                "of a round, 95 %": float(np.quantile(shares, 0.95)),
                "bound": float(useful.sum() / least.sum()),
            }
            rows.append(row)
            if spread == REPORTED_SPREAD:
                print(f"scaling lanes {lanes} {row['useful share']:.3f}", flush=True)
    return rows


# --- Partitions. ------------------------------------------------------------------------------------------------------


def partitions_part(options) -> list[dict]:
    """CPU seconds of every partition, as the median of the repeats, and of the work with the last one."""
    num_clients = options.partitioned
    labels = np.random.default_rng(0).permutation(np.arange(5 * num_clients) % CLASSES)
    owners = np.random.default_rng(1).permutation(np.arange(len(labels)) % num_clients)
    rows, partition = [], None
    for name in (*PARTITIONS, "natural"):
        config = base_config().data
        config.partition = name
        clients = min(num_clients // 100, 1_000) if name == "dirichlet_clients" else num_clients
        given = labels, CLASSES, config, clients
        seconds = []
        for seed in range(options.repeats):
            started = time.process_time()
            partition = make_partition(*given, seed, owners if name == "natural" else None)
            seconds.append(time.process_time() - started)
        rows.append({"partition": name, "clients": clients, "s": statistics.median(seconds)})
        print(rows[-1], flush=True)
    print(f"scaling partitions {max(row['s'] for row in rows):.2f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "partition.npz"
        for what, do in {
            "saved": lambda: save_partition(file, partition),
            "read": lambda: load_partition(file, len(labels), num_clients),
            "checksum": lambda: partition_sum(partition),
            "counted by class": lambda: count_classes(labels, partition, CLASSES),
        }.items():
            started = time.process_time()
            do()
            rows.append({"partition": what, "clients": num_clients, "s": time.process_time() - started})
            print(rows[-1], flush=True)
    return rows


def numbers(text: str) -> list[int]:
    """'1,3,10' to [1, 3, 10]."""
    return [int(word) for word in text.split(",")]


PARTS = {"clients": clients_part, "federation": federation_part, "lanes": lanes_part, "partitions": partitions_part}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lanes", type=int, default=0, help="of the timed rounds; 0: the backend's default")
    parser.add_argument("--clients", default="1,3,10,30,100", help="clients of a round, to sweep over")
    parser.add_argument("--images", type=int, default=100, help="of each client in that sweep")
    parser.add_argument("--examples", default="30,100,300,1000", help="images of each client, to sweep over")
    parser.add_argument("--cohort", type=int, default=10, help="clients of a round in that sweep")
    parser.add_argument("--federation", default="100,1000,10000", help="clients in the federation")
    parser.add_argument("--lane_counts", default="1,3,4,5,10")
    parser.add_argument("--spreads", default="0.3,1,5", help="s of the qualified shares' Beta(s, s)")
    parser.add_argument("--rounds", type=int, default=500, help="for each seed")
    parser.add_argument("--seeds", type=int, default=5, help="partitions")
    parser.add_argument("--partitioned", type=int, default=10_000, help="clients that labels are dealt to")
    parser.add_argument("--out", default="scaling.json")
    parser.add_argument("--memory_of", type=int, help=argparse.SUPPRESS)  # tells a point's process its size
    options = parser.parse_args()
    if options.memory_of:
        print(json.dumps(peak_memory(options.memory_of, options.lanes)))
        return
    parts = options.parts.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
    # Memory first: on a GPU this process keeps most of the device's memory once it has used the device.
    sizes = numbers(options.federation) if "federation" in parts else []
    memory = {size: memory_in_a_process_of_its_own(size, options.lanes) for size in sizes}
    tables = {}
    for part in parts:
        tables[part] = federation_part(options, memory) if part == "federation" else PARTS[part](options)
        write_tables(options.out, describe(), tables)


if __name__ == "__main__":
    main()
