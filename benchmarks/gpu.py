"""Everything that is measured on a GPU, in one command: convolutions in lanes, rounds per second, the PyTorch peer.

    python benchmarks/gpu.py --out=gpu.json                                   # random images, no data needed
    python benchmarks/gpu.py --npz=cifar10.npz --parts=strategies,rounds,peer

It needs no network and no configuration file; --npz takes real CIFAR-10 (x_train, y_train, x_test, y_test), without it
the images are random, which times the same. Parts:

  strategies  one local step of Wide-ResNet-28-2 (fix and mix views, batch 10) for 1, 3, 10 and 30 lanes, under every
              form of the lanes' convolution and both dtypes: milliseconds per lane step
  rounds      FedAnchor's round on CIFAR-10 (LDA 0.1, 10 clients a round, 5 local epochs) for both backbones: rounds a
              second, what 500 rounds take, and the share of the floors: bytes over the memory's rate and floating-point
              operations over the best matrix product
  peer        benchmarks/peer.py on the same GPU
"""

import argparse
import functools
import statistics
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from harness import describe, print_table, seconds_of, write

from fedjax_ssl import base_config
from fedjax_ssl.learning.losses import cross_entropy
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.models import build_model, passes
from fedjax_ssl.models.network import Network
from fedjax_ssl.run.experiment import build_experiment, initialise
from fedjax_ssl.run.machine import find_machine
from fedjax_ssl.run.observe.profiling import step_flops
from fedjax_ssl.run.programs import compile_dispatch

DTYPES = ("float32", "bfloat16")


def strategies(options) -> list[dict]:
    """Milliseconds per lane step, by number of lanes, form of the convolution and dtype."""
    rows = []
    for dtype in options.dtypes.split(","):
        for lanes in map(int, options.lanes.split(",")):
            for form in passes.LANE_FORMS:
                row = {"dtype": dtype, "lanes": lanes, "form": form}
                try:
                    seconds = time_lane_step(options.backbone, dtype, lanes, form, options.repeats)
                    row["ms per lane step"] = 1e3 * seconds
                except jax.errors.JaxRuntimeError as error:  # too little memory, for one
                    row["ms per lane step"] = str(error).splitlines()[0][:60]
                rows.append(row)
                print(row, flush=True)
    return rows


def time_lane_step(name: str, dtype: str, lanes: int, form: str, repeats: int, steps: int = 20) -> float:
    """Seconds of one local step of one lane, in a loop of steps over all lanes."""
    config = base_config()
    config.model.name, config.model.dtype = name, dtype
    network = Network(build_model(config.model, 10), (0.5,), (0.25,), (32, 32, 3), "running")
    images = jax.random.randint(jax.random.key(0), (10, 32, 32, 3), 0, 256).astype(jnp.float32)
    labels, mask = jnp.arange(10), jnp.ones(10, bool)

    def step(model):
        def loss_fn(params):
            outputs, updated = network.train(model._replace(params=params), (images, images), mask)
            return sum(cross_entropy(view.logits, labels, mask) for view in outputs), updated

        gradient, batch_stats = jax.grad(loss_fn, has_aux=True)(model.params)
        return Model(jax.tree.map(lambda p, g: p - 0.01 * g, model.params, gradient), batch_stats)

    with passes.use_lane_form(form):
        over_lanes = jax.vmap(step)
        run = jax.jit(lambda model: jax.lax.fori_loop(0, steps, lambda _, m: over_lanes(m), model))
        model = jax.jit(jax.vmap(network.init))(jax.random.split(jax.random.key(1), lanes))
        seconds = seconds_of({"step": functools.partial(run, model)}, repeats)["step"]
    return min(seconds) / steps / lanes


def rounds(options) -> list[dict]:
    """Rounds a second of FedAnchor on CIFAR-10, and how far that is from the floors."""
    rate, bandwidth = matrix_product_rate(options.round_dtype), memory_rate()
    rows = []
    for name in options.backbones.split(","):
        config = cifar10_config(name, options)
        experiment, machine = build_experiment(config), find_machine(config)
        started = time.perf_counter()
        dispatch = compile_dispatch(machine, [experiment])
        compile_seconds = time.perf_counter() - started
        state = jax.jit(functools.partial(initialise, experiment))(experiment.data)
        flops = step_flops(experiment, state)
        arguments = experiment.data, experiment.hidden_labels
        state = jax.block_until_ready(dispatch(state, *arguments, jnp.int32(options.warm_rounds)).state)
        seconds, steps = [], []
        for _ in range(options.repeats):
            started = time.perf_counter()
            result = jax.block_until_ready(dispatch(state, *arguments, jnp.int32(options.rounds)))
            seconds.append((time.perf_counter() - started) / options.rounds)
            state = result.state
            local_steps = jax.device_get(result.results.metrics["local_steps"])
            steps.append(float(local_steps[: options.rounds].sum()) / options.rounds)
        second, step = statistics.median(seconds), statistics.mean(steps)
        # A step reads and writes parameters, momentum and gradient; activations come on top.
        numbers = sum(leaf.size for leaf in jax.tree.leaves(state.model.params))
        rows.append(
            {
                "backbone": name,
                "dtype": options.round_dtype,
                "lanes": machine.lanes(config.clients_per_round),
                "compile s": compile_seconds,
                "s per round": second,
                "rounds per s": 1 / second,
                "500 rounds, min": 500 * second / 60,
                "local steps per round": step,
                "GFLOP/s": flops * step / second / 1e9,
                "share of matrix products": flops * step / second / rate,
                "share of memory rate": 5 * 4 * numbers * step / second / bandwidth,
            }
        )
        print(rows[-1], flush=True)
    return rows


def cifar10_config(name: str, options):
    """The paper's experiment on the given or on random images."""
    config = base_config()
    config.model.name, config.model.dtype = name, options.round_dtype
    config.data.source, config.data.path, config.data.flip = "npz", options.npz or random_npz(), True
    config.data.server_labels = 250
    config.data.examples_per_client = options.images
    config.client.epochs = options.epochs
    config.rounds_per_dispatch = max(options.rounds, options.warm_rounds)
    config.devices = 1
    return config


@functools.cache
def random_npz() -> str:
    """Random images in the shape of CIFAR-10."""
    rng, path = np.random.default_rng(0), tempfile.mkdtemp() + "/random.npz"
    sizes = {"train": 50000, "test": 10000}
    arrays = {f"x_{part}": rng.integers(0, 256, (size, 32, 32, 3), np.uint8) for part, size in sizes.items()}
    arrays |= {f"y_{part}": np.arange(size) % 10 for part, size in sizes.items()}
    np.savez(path, **arrays)
    return path


def matrix_product_rate(dtype: str, side: int = 4096) -> float:
    """The most floating-point operations a second of a square matrix product."""
    a = jnp.ones((side, side), dtype)
    product = jax.jit(lambda a: jax.lax.fori_loop(0, 10, lambda _, x: (a @ x) / side, a))
    return 10 * 2 * side**3 / min(seconds_of({"product": lambda: product(a)}, 5)["product"])


def memory_rate(megabytes: int = 256) -> float:
    """Bytes a second that a copy reads and writes."""
    x = jnp.ones(megabytes * 2**18, jnp.float32)
    copy = jax.jit(lambda x: jax.lax.fori_loop(0, 10, lambda _, y: y * 1.0001, x))
    return 10 * 2 * x.nbytes / min(seconds_of({"copy": lambda: copy(x)}, 5)["copy"])


def peer(options) -> list[dict]:
    """benchmarks/peer.py with its defaults, for both backbones."""
    import peer as module

    words = argparse.Namespace(clients=10, images=100, epochs=1, batch_size=10, repeats=options.repeats)
    return [module.compare(name, words) for name in options.backbones.split(",")]


PARTS = {"strategies": strategies, "rounds": rounds, "peer": peer}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--npz", default="", help="CIFAR-10 as an npz; random images without it")
    parser.add_argument("--lanes", default="1,3,10,30")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--backbone", default="wrn28_2", help="of the part 'strategies'")
    parser.add_argument("--backbones", default="wrn28_2,resnet18")
    parser.add_argument("--round_dtype", default="float32", choices=DTYPES)
    parser.add_argument("--images", type=int, default=0, help="for each client; 0: all")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--warm_rounds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", default="gpu.json")
    options = parser.parse_args()
    everything = []
    for part in options.parts.split(","):
        print(f"\n== {part}", flush=True)
        found = PARTS[part](options)
        print_table(found)
        everything += [{"part": part, **row} for row in found]
        write_so_far(options.out, everything)


def write_so_far(path: str, rows: list[dict]) -> None:
    """A part that fails later must not take the earlier ones with it."""
    write(path, describe(), rows, table=False)


if __name__ == "__main__":
    sys.exit(main())
