"""Makes a processor's cores devices of JAX, so that each trains a client. Must be called before JAX starts."""

import math
import os
import pathlib

import jax
from ml_collections import ConfigDict

from fedjax_ssl.errors import UserError

CPU_LIMIT = pathlib.Path("/sys/fs/cgroup/cpu.max")
# Who sets one of these has decided. The first flag is the older way to say how many devices there are.
SET_BY_USER = ("JAX_NUM_CPU_DEVICES", "xla_force_host_platform_device_count", "xla_cpu_multi_thread_eigen")
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
# Programs compile in an eighth less time, and the small CNN's steps are an eighth shorter:
# docs/notebook/performance.md. As an option of a single program it ends the process (jaxlib 0.10.2).
PLAIN_LOOPS = "--xla_backend_extra_options=xla_cpu_disable_loop_unrolling"


def use_every_core(config: ConfigDict | None = None) -> None:
    """Makes every core that this process may use a device of JAX, and has XLA leave loops for processors as they are.

    A second core inside an operation is nearly lost, one with a client of its own is not: docs/performance.md. The
    command line calls this; a notebook or a script calls it before anything is computed with JAX. A run on a GPU or a
    TPU is not affected, and the environment (JAX_NUM_CPU_DEVICES, XLA_FLAGS) has the last word.

    Args:
        config: of the run, if there is but one: with `devices=1` nothing is changed, and with fewer clients in a round
            than cores an operation may still use several of them.

    Raises:
        UserError: JAX has started.
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
    """Adds an option to XLA's, unless it is among them with a value of the user's."""
    given = os.environ.get("XLA_FLAGS", "")
    if flag.split("=")[0] not in given:
        os.environ["XLA_FLAGS"] = f"{given} {flag}".strip()


def usable_cores(limit: pathlib.Path = CPU_LIMIT) -> int:
    """Cores that this process may use: those that it is held to, or fewer where its container has less time.

    Args:
        limit: the file of the container's limit, "QUOTA PERIOD" in microseconds, or "max PERIOD".
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = limit.read_text().split()
        return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no Linux, no container, or an older kind of limit
        return cores
