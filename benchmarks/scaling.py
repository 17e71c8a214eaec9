"""Measures how a round's time grows with clients, examples and the federation.

    python benchmarks/scaling.py --out=scaling.json                    # both parts
    python benchmarks/scaling.py --parts=federation --repeats=9

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
            deviation from the first size of the process's peak resident set or, if reported, of the device's
            peak_bytes_in_use. 'planned' is the compiler's figure for the round alone.
"""

import argparse
import functools
import json
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from harness import describe, random_federation, seconds_of, write

from fedjax_ssl import base_config
from fedjax_ssl.data.kinds import Images
from fedjax_ssl.engine.interface import Problem
from fedjax_ssl.engine.round import init_key, make_round
from fedjax_ssl.methods import METHODS
from fedjax_ssl.models import build_model
from fedjax_ssl.models.network import Network
from fedjax_ssl.ops.augment import strong_augment, weak_augment
from fedjax_ssl.run.machine import find_machine

IMAGE_SHAPE = (28, 28, 1)
CLASSES, ANCHORS, TEST_IMAGES, BATCH_SIZE = 10, 50, 100, 10
FEDERATION_IMAGES, FEDERATION_COHORT, FEDERATION_EACH = 10_000, 10, 100


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
    config.confidence.threshold = -1.0
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


def numbers(text: str) -> list[int]:
    """'1,3,10' to [1, 3, 10]."""
    return [int(word) for word in text.split(",")]


PARTS = {"clients": clients_part, "federation": federation_part}


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
        write(options.out, describe(), tables)


if __name__ == "__main__":
    main()
