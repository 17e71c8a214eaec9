"""Speed of the convolutions and of one training step, inside a compiled loop.

    python benchmarks/layers.py            # both tables
    python benchmarks/layers.py --steps    # whole training steps only

Each iteration depends on the previous result, as in local training. Figures are minima of several timings after a
warm-up. '+back' is a forward pass with both gradients, three times the arithmetic of the forward pass. GFLOP/s count
the plain sum's operations, also for 'winograd', which does about half of them. XLA's options are those of
Wide-ResNet-28-2, and for a training step those of its own model. On a CPU an operation has one core, as for a client of
the command line, or all with --all_cores.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
from harness import describe, hold_to_one_core
from jax import lax

from fedjax_ssl import base_config
from fedjax_ssl.models import build_model
from fedjax_ssl.models.cpu.convolution import FEW_CHANNELS
from fedjax_ssl.models.layers import conv2d
from fedjax_ssl.run.machine import find_machine

BUDGET = 0.15  # approximate seconds of a measurement
IMPLEMENTATIONS = ("lax", "custom_backward", "winograd")
# (side, channels in, channels out, stride): the 3x3 convolutions of the small CNN, WRN-28-2 and ResNet-18.
SHAPES = (
    (28, 1, 32, 1),
    (14, 32, 64, 1),
    (32, 3, 16, 1),
    (32, 32, 32, 1),
    (32, 32, 64, 2),
    (16, 64, 64, 1),
    (8, 128, 128, 1),
    (32, 64, 64, 1),
    (16, 128, 128, 1),
    (8, 256, 512, 2),
    (4, 512, 512, 1),
)
# (model, image shape, batch, views, masked)
STEPS = (
    ("cnn", (8, 8, 1), 10, 1, False),
    ("cnn", (28, 28, 1), 10, 1, False),
    ("cnn", (28, 28, 1), 10, 1, True),
    ("cnn", (28, 28, 1), 10, 2, True),
    ("wrn28_2", (32, 32, 3), 10, 1, False),
    ("wrn28_2", (32, 32, 3), 10, 2, True),
)


def seconds_per_iteration(body, state, compiler_options):
    """The minimum time of one application of `body`, repeated inside one compiled loop."""

    @functools.partial(jax.jit, compiler_options=compiler_options)
    def loop(state, iterations):
        return lax.fori_loop(0, iterations, lambda _, s: body(s), state)

    def timed(iterations):
        start = time.perf_counter()
        jax.block_until_ready(loop(state, iterations))
        return time.perf_counter() - start

    timed(1)
    first = timed(1)
    if first > BUDGET:
        return first
    iterations = max(1, int(BUDGET / first))
    return min(timed(iterations) for _ in range(4)) / iterations


def time_convolution(batch, shape, implementation, backward):
    """Seconds of one convolution, or of one with both gradients."""
    side, channels, features, stride = shape
    x_key, kernel_key = jax.random.split(jax.random.key(0))
    x = jax.random.normal(x_key, (batch, side, side, channels))
    kernel = 0.1 * jax.random.normal(kernel_key, (3, 3, channels, features))

    def body(state):
        x, kernel = state
        if not backward:
            y = lax.optimization_barrier(conv2d(x, kernel, stride, implementation))
            return x + 1e-30 * y[0, 0, 0, 0], kernel
        y, vjp = jax.vjp(lambda x, kernel: conv2d(x, kernel, stride, implementation), x, kernel)
        # Without the barriers the compiler would compute only the used part of a result.
        x_gradient, kernel_gradient = lax.optimization_barrier(vjp(lax.optimization_barrier(y)))
        return x + 1e-30 * x_gradient[0, 0, 0, 0], kernel + 1e-30 * kernel_gradient[0, 0, 0, 0]

    return seconds_per_iteration(body, (x, kernel), find_machine(config_of("wrn28_2")).compiler_options)


def config_of(name):
    """The configuration of a backbone; it decides the programs' options."""
    config = base_config()
    config.model.update(name=name, normalisation="static")
    return config


def time_step(name, image_shape, batch, views, masked):
    """Seconds of one SGD step on cross-entropy."""
    config = config_of(name)
    model = build_model(config.model, num_classes=10)
    images = jax.random.normal(jax.random.key(0), (views * batch, *image_shape))
    labels = jnp.arange(views * batch) % 10
    mask = jnp.ones(views * batch) if masked else None
    params = jax.jit(model.init)(jax.random.key(1), images)["params"]

    def loss(params):
        logits = model.apply({"params": params}, images, train=True, mask=mask, num_views=views).logits
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()

    def body(params):
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, jax.grad(loss)(params))

    return seconds_per_iteration(body, params, find_machine(config).compiler_options)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", action="store_true", help="whole training steps only")
    parser.add_argument("--all_cores", action="store_true", help="an operation may take every core")
    arguments = parser.parse_args()
    if not arguments.all_cores:
        hold_to_one_core()
    print(", ".join(f"{name} {value}" for name, value in describe().items()) + ", float32")
    if not arguments.steps:
        print("\nmilliseconds (GFLOP/s)")
        print(f"{'batch':>5} {'shape':>17} {'forward':>14} " + " ".join(f"{'+back ' + i:>22}" for i in IMPLEMENTATIONS))
        for batch in (10, 20):
            for shape in SHAPES:
                side, channels, features, stride = shape
                flops = 2 * 9 * batch * (-(-side // stride)) ** 2 * channels * features
                times = [(flops, time_convolution(batch, shape, None, False), 14)]
                # The naive path is timed once, because one large convolution takes seconds.
                left_out = {"lax"} if batch != 10 else set()
                if stride > 1 or channels < FEW_CHANNELS:
                    left_out.add("winograd")
                for i in IMPLEMENTATIONS:
                    seconds = None if i in left_out else time_convolution(batch, shape, i, True)
                    times.append((3 * flops, seconds, 22))
                cells = [f"{1e3 * t:.2f} ({f / t / 1e9:.0f})" if t else "-" for f, t, _ in times]
                cells = [cell.rjust(width) for cell, (_, _, width) in zip(cells, times)]
                print(
                    f"{batch:>5} {f'{side} {channels}->{features} /{stride}':>17} " + " ".join(cells),
                    flush=True,
                )
    print("\none training step: milliseconds")
    for name, image_shape, batch, views, masked in STEPS:
        milliseconds = 1e3 * time_step(name, image_shape, batch, views, masked)
        shape = "x".join(map(str, image_shape))
        print(
            f"{name:>8} {shape:>8} batch {batch} views {views} masked {masked!s:<5} {milliseconds:8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
