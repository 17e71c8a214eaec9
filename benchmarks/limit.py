"""Measures how near the local step comes to the machine's limit; prints `limit NAME X`, a share of the matrix-product
rate.

    python benchmarks/limit.py --out=limit.json
    python benchmarks/limit.py --models=wrn28_2,cnn --repeats=9

The numerator is the arithmetic of a client's SGD step divided by its time inside the engine's compiled loop. The
setting is that of peer.py: a fix pass and a mix pass on 10 images each, both augmented, running batch statistics,
momentum, weight decay and clipping. The backend's default number of lanes trains as many clients, each for --steps
steps. Labels are given, so labelling costs nothing; the time includes distributing jobs and writing results.

The arithmetic is counted by layers: 2 kernel_h kernel_w in out for each output position of a convolution and 2 in out
for a linear layer, three times (forward pass, gradient of the input, gradient of the kernel), but twice for the first
layer, whose input needs no gradient. Normalisation, activations, augmentation, the optimizer and superfluous work in
the backward pass do not count, which can only lower the share. Positions in the padding count, as usual. For
Wide-ResNet-28-2, by hand: 428.7 million for the convolutions' forward pass on one image, 25,704.7 million for the step.
'XLA / by layers' compares with the compiler's count of the whole unoptimised step (without the padding, with everything
else).

The denominator is the best rate of any product of two square float32 matrices (--sizes), in a compiled loop of
dependent iterations and as a single call, with XLA's default options and with those of large backbones ("options"). The
precision is JAX's default, as for the convolutions (on a GPU perhaps TF32). On a CPU both have one core, as a client of
the command line has, or all with --all_cores. Step and products are timed in turn. `limit` uses the minima of the
timings, 'limit by medians' the medians.
"""

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from harness import describe, hold_to_one_core, random_federation, seconds_of, write_tables

from fedjax_ssl import base_config
from fedjax_ssl.augment import strong_augment, weak_augment
from fedjax_ssl.client import Labelled, fix_mix_phase
from fedjax_ssl.engine import Broadcast, Cohort, Phase, Problem, Report
from fedjax_ssl.engine.cohort import train_cohort
from fedjax_ssl.kinds import Images
from fedjax_ssl.models import build_model
from fedjax_ssl.models.layers import Conv
from fedjax_ssl.models.network import Network
from fedjax_ssl.run.machine import find_machine

IMAGE_SHAPES = {"wrn28_2": (32, 32, 3), "resnet18": (32, 32, 3), "cnn": (28, 28, 1)}
PARTS = ("backbone", "classifier")  # what a client trains
VIEWS = 2  # the fix pass and the mix pass
CLASSES = 10


def make_problem(name: str, batch_size: int, rand_augment: bool) -> Problem:
    """The setting of peer.py for one model."""
    config = base_config()
    config.model.name = name
    config.client.epochs, config.client.batch_size = 1, batch_size
    image_shape = IMAGE_SHAPES[name]
    flip = image_shape[-1] == 3
    weak = functools.partial(weak_augment, flip=flip, padding=config.augment.padding)
    strong = functools.partial(
        strong_augment,
        flip=flip,
        padding=config.augment.padding,
        flavour=config.augment.flavour,
        num_ops=config.augment.num_ops,
        magnitude=config.augment.magnitude,
    )
    network = Network(build_model(config.model, CLASSES), Images(image_shape, (0.5,), (0.25,)), "running")
    return Problem(config, network, weak, strong if rand_augment else weak, CLASSES)


def make_phase(problem: Problem) -> Phase:
    """Fix and mix training in which every image has its label, so that all clients have equal lengths."""

    def label(broadcast, data, examples):
        return Labelled(Report(examples.labels, examples.present))

    return fix_mix_phase(problem, label, mixup_alpha=0.75, mix_weight=1.0, mix_order="mix_then_augment", parts=PARTS)


def step_arithmetic(network: Network, batch_size: int) -> int:
    """Floating-point operations of one SGD step's convolutions and linear layers; see the module's docstring."""
    forward = {}  # path of the layer -> operations, in the order of their runs

    def count(layer, arguments, keywords, context):
        y = layer(*arguments, **keywords)
        module = context.module
        if context.method_name == "__call__" and isinstance(module, Conv | nn.Dense):
            x = arguments[0]
            # A linear layer may be a `FlatDense`, which flattens its input.
            inputs = math.prod((*module.kernel_size, x.shape[-1]) if isinstance(module, Conv) else x.shape[1:])
            forward[module.path] = 2 * inputs * y.size
        return y

    model = jax.eval_shape(network.init, jax.random.key(0))
    view = jax.ShapeDtypeStruct((batch_size, *network.inputs.shape), jnp.uint8)
    mask = jax.ShapeDtypeStruct((batch_size,), bool)
    with nn.intercept_methods(count):
        jax.eval_shape(network.train, model, (view,) * VIEWS, mask)
    # Nothing uses the anchor head, and the compiler removes it.
    forward = {path: operations for path, operations in forward.items() if path[0] in PARTS}
    kernels = [leaf for part in PARTS for leaf in jax.tree.leaves(model.params[part]) if leaf.ndim > 1]
    assert len(forward) == len(kernels), f"{len(kernels)} kernels, but {len(forward)} layers were met: {list(forward)}"
    first = next(iter(forward.values()))
    return 3 * sum(forward.values()) - first


def compiler_arithmetic(phase: Phase, broadcast, data, cohort: Cohort) -> float:
    """XLA's count of everything in one step of one client, before optimisation."""
    jobs = jax.eval_shape(lambda *arguments: phase.prepare(*arguments, None), broadcast, data, cohort)
    work = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), jobs.work)
    carry = jax.eval_shape(phase.start, broadcast, data, work, {})
    lowered = jax.jit(phase.step).lower(broadcast, data, work, carry, jnp.int32(0), jax.random.key(0))
    return lowered.cost_analysis()["flops"]


def training_side(name: str, options) -> tuple[Callable, dict]:
    """A function that trains a cohort in one program, and a row with its arithmetic ('operations')."""
    problem = make_problem(name, options.batch_size, options.rand_augment)
    machine = find_machine(problem.config)
    lanes = options.lanes or machine.lanes(problem.config.clients_per_round)
    phase = make_phase(problem)
    images_each = options.steps * options.batch_size
    rows = np.arange(lanes * images_each).reshape(lanes, images_each)
    data = random_federation(rows, rows.size, IMAGE_SHAPES[name], CLASSES)
    broadcast = Broadcast(jax.jit(problem.network.init)(jax.random.key(0)), jnp.float32(0.03))
    cohort = Cohort(jnp.arange(lanes), {}, jax.random.key(1))

    @functools.partial(jax.jit, compiler_options=machine.compiler_options)
    def train(broadcast, data, cohort):
        result = train_cohort((phase,), broadcast, data, cohort, lanes)
        return result.upload, result.num_steps

    num_steps = np.asarray(train(broadcast, data, cohort)[1])
    assert (num_steps == options.steps).all(), f"a cohort of {options.steps} steps each took {num_steps}"
    by_layers = step_arithmetic(problem.network, options.batch_size)
    row = {
        "model": name,
        "lanes": lanes,
        "steps": lanes * options.steps,
        "MFLOP per step": by_layers / 1e6,
        "XLA / by layers": compiler_arithmetic(phase, broadcast, data, cohort) / by_layers,
        "operations": lanes * options.steps * by_layers,
    }
    return functools.partial(train, broadcast, data, cohort), row


def product_sides(size: int, budget: float, compiler: dict) -> tuple[dict[str, Callable], dict[str, float]]:
    """Square matrix products: functions by name, in a loop and as a single call, and the operations of each."""
    kind = f"{size}, options" if compiler else f"{size}"
    keys = jax.random.split(jax.random.key(size))
    # Division by sqrt(size) keeps its powers from overflow and underflow.
    a, b = (jax.random.normal(key, (size, size)) / math.sqrt(size) for key in keys)
    loop = jax.jit(lambda a, b, count: jax.lax.fori_loop(0, count, lambda _, x: x @ b, a), compiler_options=compiler)
    once = jax.jit(lambda a, b: a @ b, compiler_options=compiler)

    def timed(count):
        started = time.perf_counter()
        jax.block_until_ready(loop(a, b, count))
        return time.perf_counter() - started

    timed(1)
    first = min(timed(1) for _ in range(3))
    iterations = int(np.clip(budget / first, 1, 10_000))
    operations = 2 * size**3
    sides = {f"loop {kind}": functools.partial(loop, a, b, iterations), f"once {kind}": functools.partial(once, a, b)}
    return sides, {f"loop {kind}": iterations * operations, f"once {kind}": operations}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="wrn28_2")
    parser.add_argument("--batch_size", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="of each client, in one program")
    parser.add_argument("--lanes", type=int, default=0, help="clients side by side; 0: the backend's default")
    parser.add_argument("--rand_augment", action="store_true", help="on the fix pass, instead of flip and crop")
    parser.add_argument("--sizes", default="512,1024,2048,4096", help="of the square matrices")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds of one loop of products, about")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--all_cores", action="store_true", help="an operation may take every core")
    parser.add_argument("--out", default="limit.json")
    options = parser.parse_args()

    if not options.all_cores:
        hold_to_one_core()
    products, operations = {}, {}
    for size in map(int, options.sizes.split(",")):
        for compiler in {str(of): of for of in ({}, find_machine(base_config()).compiler_options)}.values():
            sides, counts = product_sides(size, options.budget, compiler)
            products, operations = {**products, **sides}, {**operations, **counts}
    rows, rates = [], []
    for name in options.models.split(","):
        train, row = training_side(name, options)
        done = {**operations, "step": row.pop("operations")}
        times = seconds_of({"step": train, **products}, options.repeats)
        best = {side: done[side] / min(seconds) / 1e9 for side, seconds in times.items()}
        middle = {side: done[side] / statistics.median(seconds) / 1e9 for side, seconds in times.items()}
        fastest = max(products, key=best.get)
        row |= {
            "ms per step": 1e3 * min(times["step"]) / row["steps"],
            "GFLOP/s of the step": best["step"],
            "GFLOP/s of products": best[fastest],
            "best product": fastest,
            "limit": best["step"] / best[fastest],
            "limit by medians": middle["step"] / max(middle[side] for side in products),
        }
        rates += [
            {"timed with": name, "product": side, "GFLOP/s, best": best[side], "GFLOP/s, median": middle[side]}
            for side in products
        ]
        print(f"limit {name} {row['limit']:.3f}", flush=True)
        rows.append(row)
    write_tables(options.out, describe(), {"local step": rows, "square matrix products": rates})


if __name__ == "__main__":
    main()
