"""What depends on the machine and changes no result beyond rounding: devices, lanes, memory, the compilation cache."""

import contextlib
import functools
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from fedjax_ssl.engine.lanes import AXIS
from fedjax_ssl.errors import UserError

# On a CPU one lane at a time: convolutions under vmap become grouped ones, which its backend runs several times
# slower. Elsewhere the whole cohort side by side.
DEFAULT_LANES = {"cpu": 1}

# The first two were measured, and the third has the second's layers, wider. A user's backbone, which nobody has
# measured, gets XLA's own choice.
LARGE_BACKBONES = ("resnet18", "wrn28_2", "wrn28_8")
OF_LARGE_BACKBONES = {"xla_cpu_experimental_ynn_fusion_type": ""}


def use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache folder, unless JAX has been told where, or not to."""
    if jax.config.jax_compilation_cache_dir is None and jax.config.jax_enable_compilation_cache:
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "fedjax_ssl" / "xla"))


def default_lanes(config: ConfigDict, num_seeds: int = 1) -> int:
    """How many clients train side by side on each device, where the configuration leaves it to the backend."""
    num_jobs = config.clients_per_round * num_seeds
    return min(config.lanes or DEFAULT_LANES.get(jax.default_backend(), num_jobs), num_jobs)


def seeds_together(num_seeds: int) -> int:
    """How many seeds share a program: on a CPU, where their lanes would only queue up, one."""
    return 1 if jax.default_backend() == "cpu" else num_seeds


@contextlib.contextmanager
def use_devices(number: int | None) -> Iterator[None]:
    """Makes so many devices (None: all) share the lanes of whatever is traced and run inside.

    Raises:
        UserError: there are not so many.
    """
    devices = jax.devices()
    if number is not None and number > len(devices):
        raise UserError(f"devices is {number}, but JAX finds {len(devices)} ({devices[0].platform})")
    devices = devices[:number]
    if len(devices) == 1:
        yield
        return
    with jax.set_mesh(Mesh(np.array(devices), (AXIS,))):
        yield


def on_all_devices(tree: Any) -> Any:
    """A copy of every leaf on each of the devices in use."""
    mesh = jax.sharding.get_mesh()
    return tree if mesh.empty else jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def jit_on_all_devices(function: Any, **options: Any) -> Any:
    """`jax.jit` of a function whose arguments and results all devices hold."""
    if not jax.sharding.get_mesh().empty:
        options.update(in_shardings=PartitionSpec(), out_shardings=PartitionSpec())
    return jax.jit(function, **options)


def compiler_options(config: ConfigDict) -> dict[str, str]:
    """XLA's options for the programs of a run, for `jax.jit(compiler_options=...)`; docs/performance.md has the reason.

    On a CPU XLA hands matrix products and convolutions to a library that is quick with small ones and slow with large
    ones: a step of Wide-ResNet-28-2 takes 404 ms with it and 335 without, the small CNN's 6.3 with and 9.4 without.
    """
    large = config.model.name in LARGE_BACKBONES
    return dict(OF_LARGE_BACKBONES) if large and jax.default_backend() == "cpu" and _knows_options() else {}


@functools.cache
def _knows_options() -> bool:
    """Whether this XLA has the options: they are experimental, and come and go with its versions."""
    try:
        jax.jit(lambda x: x, compiler_options=dict(OF_LARGE_BACKBONES)).lower(0.0).compile()
    except Exception:  # whatever it says, it does not take them
        return False
    return True


def check_memory(program: Any) -> None:
    """Looks whether a compiled program fits into the memory of a device.

    Raises:
        UserError: it does not, with both sizes and the fields that bound the memory.
    """
    analysis, limit = program.memory_analysis(), memory_limit()
    if analysis is None or limit is None:
        return
    needed = (
        analysis.temp_size_in_bytes
        + analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )
    if needed > limit:
        raise UserError(
            f"a round needs {needed / 2**30:.1f} GiB, but the device has {limit / 2**30:.1f}; lower lanes, "
            "client.batch_size, server.batch_size or eval_batch_size"
        )


def memory_limit() -> int | None:
    """Bytes that the first device can hold; for a CPU the machine's memory; None where nobody says."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return (device.memory_stats() or {}).get("bytes_limit")
