"""Shared by the benchmarks: timing in turn, describing the machine, printing and writing a table."""

import itertools
import json
import os
import pathlib
import platform
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data import FederatedData


def seconds_of(sides: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Times functions in turn, so that other work of the machine affects all of them alike.

    Args:
        sides: name -> a function, whose result is waited for. Each is called once without timing, which excludes
            compilation.
        repeats: number of timed calls of each.

    Returns:
        The seconds of each call.
    """
    for function in sides.values():
        jax.block_until_ready(function())
    times = {name: [] for name in sides}
    for _ in range(repeats):
        for name, function in sides.items():
            started = time.perf_counter()
            jax.block_until_ready(function())
            times[name].append(time.perf_counter() - started)
    return times


def describe() -> dict:
    """The machine and the versions behind a figure."""
    model = ""
    if pathlib.Path("/proc/cpuinfo").exists():
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "device": f"{jax.devices()[0].device_kind} x {jax.device_count()}",
        "cpu": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def write(path: str, machine: dict, rows: list[dict]) -> None:
    """Prints the machine and rows as Markdown tables, one for each set of columns, and writes them as JSON."""
    print("\n" + ", ".join(f"{name} {value}" for name, value in machine.items()))
    for names, group in itertools.groupby(rows, key=list):
        print("\n| " + " | ".join(names) + " |\n|" + "---|" * len(names))
        for row in group:
            cells = [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row.values()]
            print("| " + " | ".join(cells) + " |")
    pathlib.Path(path).write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


def federation(inputs, labels, client_index: np.ndarray, server_labels: int = 1, num_test: int = 1) -> FederatedData:
    """A federation for timing, in which clients see their labels; the images' content changes no time.

    Args:
        inputs: uint8 [N, height, width, channels]; the last `server_labels` are the server's, the first ones also test.
        labels: int [N].
        client_index: int [K, n], rows of each client; a row may have several owners.
        server_labels, num_test: the numbers of the server's labelled images and of test images.
    """
    inputs, labels = jnp.asarray(inputs), jnp.asarray(labels, jnp.int32)
    size = jnp.full(len(client_index), client_index.shape[1], jnp.int32)
    return FederatedData(
        inputs=inputs,
        visible_labels=labels,
        client_index=jnp.asarray(client_index, jnp.int32),
        client_size=size,
        labelled_size=size,
        largest_size=size[0],
        server_index=jnp.arange(len(inputs) - server_labels, len(inputs), dtype=jnp.int32),
        validation_index=jnp.zeros((0,), jnp.int32),
        test_inputs=inputs[:num_test],
        test_labels=labels[:num_test],
        seed=jnp.int32(0),
    )


def random_npz(path: pathlib.Path, train: int = 50_000, test: int = 10_000) -> str:
    """The path of an npz with random images of CIFAR-10's shape; written if missing."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        rng, sizes = np.random.default_rng(0), {"train": train, "test": test}
        arrays = {f"x_{part}": rng.integers(0, 256, (size, 32, 32, 3), np.uint8) for part, size in sizes.items()}
        np.savez(path, **arrays, **{f"y_{part}": np.arange(size) % 10 for part, size in sizes.items()})
    return str(path)
