"""Shared by the benchmarks: timing in turn, describing the machine, printing and writing a table."""

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


def write(path: str, machine: dict, tables: list[dict] | dict[str, list[dict]]) -> None:
    """Prints the machine and a table, or several by name, and writes them as JSON."""
    print("\n" + ", ".join(f"{name} {value}" for name, value in machine.items()))
    for name, rows in tables.items() if isinstance(tables, dict) else [("", tables)]:
        print(f"\n{name}".rstrip())
        print_table(rows)
    key = "tables" if isinstance(tables, dict) else "rows"
    pathlib.Path(path).write_text(json.dumps({"machine": machine, key: tables}, indent=2) + "\n")


def random_federation(
    client_index: np.ndarray,
    num_images: int,
    image_shape: tuple[int, int, int],
    num_classes: int = 10,
    server_labels: int = 1,
    num_test: int = 1,
) -> FederatedData:
    """A federation of random images for timing; the images' content changes no time.

    Args:
        client_index: int [K, n], rows of each client, from 0 to num_images - 1; a row may have several owners.
        num_images: of the clients; the server's images follow them.
        image_shape: (height, width, channels).
        num_classes: C. All labels are visible, for benchmarks that give clients their labels.
        server_labels: labelled images at the server.
        num_test: test images.
    """
    rng = np.random.default_rng(0)

    def images(count):
        return jnp.asarray(rng.integers(0, 256, (count, *image_shape), np.uint8))

    return FederatedData(
        inputs=images(num_images + server_labels),
        visible_labels=jnp.asarray(np.arange(num_images + server_labels) % num_classes, jnp.int32),
        client_index=jnp.asarray(client_index, jnp.int32),
        client_size=jnp.full(len(client_index), client_index.shape[1], jnp.int32),
        labelled_size=jnp.full(len(client_index), client_index.shape[1], jnp.int32),
        server_index=jnp.arange(num_images, num_images + server_labels, dtype=jnp.int32),
        validation_index=jnp.zeros((0,), jnp.int32),
        test_inputs=images(num_test),
        test_labels=jnp.asarray(np.arange(num_test) % num_classes, jnp.int32),
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


def print_table(rows: list[dict]) -> None:
    """Prints rows with equal keys as a Markdown table."""
    names = list(rows[0])
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in rows:
        print("| " + " | ".join(_text(row[name]) for name in names) + " |")


def _text(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
