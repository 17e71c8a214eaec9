"""Measures how a round's time grows with clients, examples and the federation.

    python benchmarks/scaling.py --out=scaling.json    # all sweeps
    python benchmarks/scaling.py --sweeps=federation --repeats=9

Times whole rounds of FedAnchor: the small CNN on random images of 28x28x1, one local epoch in batches of 10, 50 images
at the server, 100 test images. The threshold is below all cosines, so all images are trained on and the work is known.
All points of a sweep are timed in turn in one process; a time is the median over the repeats. Sweeps:

clients     10 of the 100 clients of a federation train, then 1, 3, ...; each has 100 images
images      10 clients of 30, 100, ... images
federation  the federation has 100, 1,000 and 10,000 clients of 100 images, 10 of whom train

Clients draw their images with repetition from the same 10,000. Prints `scaling SWEEP X`. For clients and images X is
the largest relative deviation from the line a + b * local steps with the least relative error. Where a round has by
default a lane for each client, clients need not grow in a line; --lanes sets one number for all points. For the
federation X is the largest deviation from the time of the first size, as the median of the repeats' ratios.
"""

import argparse
import functools
import statistics
from collections.abc import Callable

import jax
import numpy as np
from harness import describe, federation, seconds_of, write

from fedjax_ssl import base_config
from fedjax_ssl.engine.round import init_key, make_round
from fedjax_ssl.run.experiment import make_method, make_problem
from fedjax_ssl.run.machine import find_machine

FACTS = {"image_shape": (28, 28, 1), "flip": False, "num_classes": 10, "mean": (0.5,), "std": (0.25,)}
IMAGES, ANCHORS, TEST_IMAGES, BATCH_SIZE = 10_000, 50, 100, 10
SWEEPS = {  # name -> (clients of the federation, clients of a round, images of a client) of each point
    "clients": [(100, cohort, 100) for cohort in (1, 3, 10, 30, 100)],
    "images": [(100, 10, images) for images in (30, 100, 300, 1000)],
    "federation": [(clients, 10, 100) for clients in (100, 1000, 10_000)],
}


def round_of(num_clients: int, clients_per_round: int, images_each: int, lanes: int) -> tuple[Callable, int]:
    """A compiled first round in which every client trains on all its images, and the number of its lanes.

    The function takes no arguments and returns the state and a `RoundResult`. 0 lanes take the backend's default.
    """
    config = base_config()
    config.model.name, config.confidence.threshold, config.server.pretrain_epochs = "cnn", -1.0, 0
    config.num_clients, config.clients_per_round = num_clients, clients_per_round
    config.client.epochs, config.client.batch_size, config.lanes = 1, BATCH_SIZE, lanes or None
    problem = make_problem(config, FACTS, lacks_labels=False)
    method, rng = make_method(problem), np.random.default_rng(0)
    images = rng.integers(0, 256, (IMAGES + ANCHORS, *FACTS["image_shape"]), np.uint8)
    rows = rng.integers(0, IMAGES, (num_clients, images_each))
    data = federation(images, np.arange(len(images)) % FACTS["num_classes"], rows, ANCHORS, TEST_IMAGES)
    state = jax.jit(lambda data: method.init(data, init_key(data.seed)))(data)
    lanes = find_machine(config).lanes(clients_per_round)
    arguments = (state, data, data.visible_labels)
    # The result includes the state, because unused results would not be computed.
    run = functools.partial(jax.jit(make_round(problem, method, lanes)).lower(*arguments).compile(), *arguments)
    expected, taken = steps_of(clients_per_round, images_each), int(run()[1].metrics["local_steps"])
    assert taken == expected, f"the round took {taken} local steps instead of {expected}: not every image qualified"
    return run, lanes


def steps_of(clients: int, images_each: int) -> int:
    """Local steps of a round."""
    return clients * -(-images_each // BATCH_SIZE)


def line_through(work: list[float], seconds: list[float]) -> np.ndarray:
    """The values at `work` of the line a + b * work with the least squared relative distances from `seconds`."""
    work, seconds = np.array(work, float), np.array(seconds)
    design = np.stack([np.ones_like(work), work], axis=1)
    return design @ np.linalg.lstsq(design / seconds[:, None], np.ones_like(seconds), rcond=None)[0]


def measure(sweep: str, options) -> list[dict]:
    """A row for each point of a sweep."""
    points = SWEEPS[sweep]
    rounds = {point: round_of(*point, options.lanes) for point in points}
    times = seconds_of({point: run for point, (run, _) in rounds.items()}, options.repeats)
    steps, seconds = [steps_of(*point[1:]) for point in points], [statistics.median(times[point]) for point in points]
    if sweep == "federation":
        first = times[points[0]]
        off = [statistics.median(t / f for t, f in zip(times[point], first)) - 1 for point in points]
    else:
        off = np.array(seconds) / line_through(steps, seconds) - 1
    print(f"scaling {sweep} {np.abs(off).max():.3f}", flush=True)
    names = ("federation", "clients", "images each")
    return [
        {"sweep": sweep, **dict(zip(names, point)), "lanes": rounds[point][1], "local steps": step, "seconds": second,
         "ms per step": 1e3 * second / step, "off": float(deviation)}
        for point, step, second, deviation in zip(points, steps, seconds, off)
    ]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", default=",".join(SWEEPS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lanes", type=int, default=0, help="of the timed rounds; 0: the backend's default")
    parser.add_argument("--out", default="scaling.json")
    options = parser.parse_args()
    write(options.out, describe(), [row for sweep in options.sweeps.split(",") for row in measure(sweep, options)])


if __name__ == "__main__":
    main()
