"""What the benchmarks share: timing in turn, describing the machine, printing and writing a table."""

import json
import os
import pathlib
import platform
import time
from collections.abc import Callable

import jax


def seconds_of(sides: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Times functions in turn, so that whatever else the machine does meets all of them alike.

    Args:
        sides: name -> a function whose result is waited for. Each is called once beforehand: compilation, and
            whatever else only a first call does, is left out.
        repeats: how often each is timed.

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
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def write(path: str, machine: dict, rows: list[dict]) -> None:
    """Prints the rows as a table, and writes them as JSON."""
    print("\n" + ", ".join(f"{name} {value}" for name, value in machine.items()))
    print_table(rows)
    pathlib.Path(path).write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


def print_table(rows: list[dict]) -> None:
    """Rows of the same keys as a Markdown table."""
    names = list(rows[0])
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in rows:
        print("| " + " | ".join(_text(row[name]) for name in names) + " |")


def _text(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
