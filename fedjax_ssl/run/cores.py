"""Makes each core of a CPU a device of JAX, so that each trains a client. Call it before JAX starts."""

import contextlib
import math
import os
import pathlib
from collections.abc import Sequence

import jax
from ml_collections import ConfigDict

from fedjax_ssl.base.errors import UserError

CONTROL_GROUPS = pathlib.Path("/sys/fs/cgroup")
OWN_GROUPS = pathlib.Path("/proc/self/cgroup")  # a line for each hierarchy: NUMBER:CONTROLLERS:PATH
# If the user has set one of these, nothing is changed. The first flag is the older way to set the number of devices.
SET_BY_USER = ("JAX_NUM_CPU_DEVICES", "xla_force_host_platform_device_count", "xla_cpu_multi_thread_eigen")
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
# Programs compile in an eighth less time, and the small CNN's steps take an eighth less time:
# docs/performance.md. Set for a single program, it crashes the process (jaxlib 0.10.2).
PLAIN_LOOPS = "--xla_backend_extra_options=xla_cpu_disable_loop_unrolling"


def use_every_core(config: ConfigDict | None = None) -> None:
    """Makes every core that this process may use a device of JAX, and turns off XLA's loop unrolling on CPUs.

    A second core speeds up one operation little; a core for each client speeds up a round: docs/performance.md. The
    command line calls this. In a notebook or a script, call it before the first computation with JAX. It does not
    affect runs on a GPU or a TPU. The environment variables JAX_NUM_CPU_DEVICES and XLA_FLAGS take precedence.

    Args:
        config: the run's, if the process trains only one. With `devices=1` nothing is changed. With fewer clients in a
            round than cores, an operation may still use several cores.

    Raises:
        UserError: JAX has started already.
    """
    _add_flag(PLAIN_LOOPS)
    cores = usable_cores()
    given = " ".join([*os.environ, os.environ.get("XLA_FLAGS", "")])
    if cores == 1 or any(name in given for name in SET_BY_USER) or (config is not None and config.devices == 1):
        return
    if jax.config.values["jax_num_cpu_devices"] == cores:  # a second run of this process
        return
    try:
        jax.config.update("jax_num_cpu_devices", cores)
    except RuntimeError:
        raise UserError("use_every_core comes too late: JAX has started; call it before anything is computed") from None
    if config is None or config.clients_per_round >= cores:
        _add_flag(ONE_THREAD)


def _add_flag(flag: str) -> None:
    """Adds an option to XLA_FLAGS unless the user has set it."""
    given = os.environ.get("XLA_FLAGS", "")
    if flag.split("=")[0] not in given:
        os.environ["XLA_FLAGS"] = f"{given} {flag}".strip()


def control_groups(root: pathlib.Path = CONTROL_GROUPS, own: pathlib.Path = OWN_GROUPS) -> list[pathlib.Path]:
    """The folders of this process's control groups on Linux, and of the groups around them, whose limits hold too.

    A container sees its own group as `root`; a batch system such as Slurm makes groups inside `root`. A folder may
    not exist.
    """
    try:
        hierarchies = [line.split(":", 2)[1:] for line in own.read_text().splitlines()]
    except OSError:
        hierarchies = [["", "/"]]
    folders = []
    for controllers, path in hierarchies:  # no controllers: version 2, which has one hierarchy
        top = root / controllers
        folder = top / path.lstrip("/")
        folders += [group for group in (folder, *folder.parents) if group.is_relative_to(top)]
    return folders


def usable_cores(groups: Sequence[pathlib.Path] | None = None) -> int:
    """The number of cores that this process may use, by its CPU affinity and its control groups' limits.

    `groups` are their folders; a file `cpu.max` has "QUOTA PERIOD" in microseconds or "max PERIOD".
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in control_groups() if groups is None else groups:
        with contextlib.suppress(OSError, ValueError):  # not Linux, no limit ("max"), or an older kind of limit
            quota, period = (group / "cpu.max").read_text().split()
            cores = max(1, min(cores, math.ceil(int(quota) / int(period))))
    return cores
