"""The machine's devices, lanes, memory and compilation cache. They change results by rounding only."""

import collections
import contextlib
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.multihost_utils import host_local_array_to_global_array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from fedjax_ssl.base.devices import AXIS, platform, use_platform
from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.files import cache_folder, private_cache
from fedjax_ssl.models import build_model
from fedjax_ssl.models.packing import CHANNELS
from fedjax_ssl.run import hosts
from fedjax_ssl.run.cores import control_groups
from fedjax_ssl.run.kept_files import keep_programs
from fedjax_ssl.run.observe.log import warn

MEMORY_LIMITS = ("memory.max", "memory.limit_in_bytes")  # files of the two versions of Linux's control groups
MOST_CACHE_BYTES = 2_000_000_000  # of XLA's cache; the least recently used programs are removed

# JAX's settings -> the values with which runs train, the default first.
JAX_SETTINGS: dict[str, tuple[Any, ...]] = {
    "jax_debug_nans": (False,),  # a metric that a round does not have is NaN
    "jax_disable_jit": (False,),
    "jax_enable_x64": (False,),
    "jax_numpy_dtype_promotion": ("standard",),
    "jax_numpy_rank_promotion": ("allow", "warn"),
    # Other generators draw other numbers, and no record says which one a run was begun with.
    "jax_default_prng_impl": ("threefry2x32",),
    "jax_threefry_partitionable": (True,),
}


class Machine(NamedTuple):
    """The devices of a run, and how its programs are compiled for them."""

    platform: str  # 'cpu', 'gpu' or 'tpu'
    mesh: Mesh | None  # the devices that share the lanes; None for a single one
    most_lanes: int | None  # the most clients that train side by side on each device; None: no limit
    memory: int | None  # bytes of memory of one device; None: unknown

    def __str__(self) -> str:
        number = 1 if self.mesh is None else self.mesh.size
        several = f"{hosts.count()} hosts, " if hosts.count() > 1 else ""
        return f"{several}{number} device{'s' * (number > 1)} ({self.platform})"

    def lanes(self, num_jobs: int) -> int:
        """How many jobs train side by side on each device; a job is a client of one of the seeds in a program."""
        return min(self.most_lanes or num_jobs, num_jobs)

    def seeds_together(self, num_seeds: int) -> int:
        """How many seeds share a program: one on a CPU, where lanes wait for each other, and on several hosts."""
        return 1 if self.platform == "cpu" or hosts.count() > 1 else num_seeds

    def put(self, tree: Any) -> Any:
        """Copies every leaf to each device. With several hosts, each host has all leaves and copies its own."""
        if self.mesh is None:
            return tree
        if hosts.count() > 1:
            return host_local_array_to_global_array(tree, self.mesh, PartitionSpec())
        return jax.device_put(tree, NamedSharding(self.mesh, PartitionSpec()))

    def share(self, tree: Any) -> Any:
        """As `put`, for what no program overwrites: the devices of a CPU read the same memory, and nothing is copied.

        For that JAX takes views of NumPy. These have no weak types, so that numbers with such a type are put as before.
        """
        if self.platform == "cpu" and self.mesh is not None and hosts.count() == 1:
            tree = jax.tree.map(lambda leaf: leaf if jax.typeof(leaf).weak_type else np.asarray(leaf), tree)
        return self.put(tree)

    def jit(self, function: Any, **options: Any) -> Any:
        """`jax.jit` of a function whose arguments and results are replicated on all devices."""
        if self.mesh is not None:
            options.update(in_shardings=PartitionSpec(), out_shardings=PartitionSpec())
        return jax.jit(function, **options)

    def check_memory(self, program: Any, name: str = "a round") -> None:
        """Checks that a compiled program fits into a device's memory.

        Else raises a UserError, whose message has both sizes and the fields that reduce the memory.
        """
        analysis = program.memory_analysis()
        if analysis is None or self.memory is None:
            return
        needed = (
            analysis.temp_size_in_bytes
            + analysis.argument_size_in_bytes
            + analysis.output_size_in_bytes
            - analysis.alias_size_in_bytes
        )
        if needed > self.memory:
            raise UserError(
                f"{name} needs {needed / 2**30:.1f} GiB, but the device has {self.memory / 2**30:.1f}; lower lanes, "
                "client.batch_size, server.batch_size or eval_batch_size, or num_clients if each keeps a model"
            )


@contextlib.contextmanager
def use_machine(config: ConfigDict) -> Iterator[Machine]:
    """The machine of a run, see `find_machine`. Programs that are traced and run inside spread their lanes over it."""
    use_compilation_cache()
    with use(find_machine(config)) as machine:
        yield machine


@contextlib.contextmanager
def use(machine: Machine) -> Iterator[Machine]:
    """A context in which programs are traced and run for this machine."""
    mesh = contextlib.nullcontext() if machine.mesh is None else jax.set_mesh(machine.mesh)
    with use_platform(machine.platform), mesh:
        yield machine


def find_machine(config: ConfigDict) -> Machine:
    """The machine that a configuration asks for, by its fields `devices` and `lanes`.

    Without `devices` it has all devices; on a CPU, at most one core for each client of a round. Without `lanes` it has
    `most_lanes`. Raises a UserError if there are too few devices, or the hosts cannot have equally many.
    """
    devices, num_hosts = jax.devices(), hosts.count()
    if config.devices is not None and config.devices > len(devices):
        raise UserError(f"devices is {config.devices}, but JAX finds {len(devices)} ({devices[0].platform})")
    if config.devices is not None and config.devices % num_hosts:
        raise UserError(f"devices is {config.devices}, but of {num_hosts} hosts each must have equally many of them")
    most = config.devices or len(devices)
    if config.devices is None and platform() == "cpu":
        most = max(min(most, config.clients_per_round) // num_hosts, 1) * num_hosts
    chosen = _devices_of_each_host(most // num_hosts)
    mesh = Mesh(np.array(chosen), (AXIS,), axis_types=(AxisType.Auto,)) if len(chosen) > 1 else None
    return Machine(platform(), mesh, config.lanes or most_lanes(config), memory_limit())


def most_lanes(config: ConfigDict) -> int | None:
    """How many clients train side by side on each device by default; None: the whole cohort.

    One on a CPU: vmap turns convolutions into grouped ones, which the CPU backend runs several times slower. On a TPU,
    as many as fill its channels (one for a wide backbone), see `packing`; docs/performance.md has the estimates.
    """
    if platform() != "tpu":
        return 1 if platform() == "cpu" else None
    try:
        backbone = build_model(config.model, num_classes=1).backbone
    except UserError:  # it is not for images, so it has no channels
        return None
    narrow = getattr(backbone, "narrow_channels", None) if config.encoder.name == "none" else None
    return None if narrow is None else max(1, CHANNELS // narrow)


def _devices_of_each_host(number: int) -> list[jax.Device]:
    """This many devices of each host, in JAX's order."""
    taken: collections.Counter[int] = collections.Counter()
    chosen = []
    for device in jax.devices():
        taken[device.process_index] += 1
        if taken[device.process_index] <= number:
            chosen.append(device)
    return chosen


def check_jax_settings() -> None:
    """Raises a UserError if the user has set JAX in a way in which no run trains, or trains with other results."""
    for name, values in JAX_SETTINGS.items():
        found = getattr(jax.config, name, values[0])  # other versions of JAX may lack it
        found = getattr(found, "value", found)  # of an Enum
        if found not in values:
            raise UserError(
                f"JAX's setting {name} is {found!r}, with which runs fail or draw other numbers; use {values[0]!r}"
            )


def use_compilation_cache() -> None:
    """Caches compiled programs in the user's cache folder, unless the user has configured JAX's cache."""
    set_by_user = jax.config.values
    if set_by_user["jax_compilation_cache_dir"] is None and set_by_user["jax_enable_compilation_cache"]:
        folder = private_cache("xla", MOST_CACHE_BYTES)
        if folder is not None:
            keep_programs(folder)
        else:
            warn(f"compiled programs are not kept: {cache_folder()} is not writable, or other users can write into it")


def memory_limit(groups: Sequence[pathlib.Path] | None = None) -> int | None:
    """Bytes of memory of a host's first device; on a CPU, those that a process may use; None: unknown.

    With several hosts it is the smallest of their limits, so that all place the federation alike. All must call this.
    `groups` are the folders of this process's control groups; a file of `MEMORY_LIMITS` has a number of bytes or "max".
    """
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return hosts.smallest((device.memory_stats() or {}).get("bytes_limit"))
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")] if hasattr(os, "sysconf") else []
    for group in control_groups() if groups is None else groups:
        for name in MEMORY_LIMITS:
            with contextlib.suppress(OSError, ValueError):  # not Linux, no limit, the other version, or "max"
                limits.append(int((group / name).read_text()))
    return hosts.smallest(min(limits, default=None))
