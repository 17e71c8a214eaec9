"""Finds which hosts train one run together, from the command line, SLURM or a TPU pod."""

import os
import re
from typing import NamedTuple

from fedjax_ssl.base.errors import UserError

FLAGS = ("coordinator", "num_processes", "process_id")
FOUND = ("slurm", "gketpu", "gcetpu")  # JAX's names of the clusters that are detected: SLURM, and two kinds of TPU pods


class Place(NamedTuple):
    """One process among all that train together."""

    coordinator: str  # HOST:PORT of the first process, which all connect to
    # Number of processes, at least two.
    count: int  # type: ignore[assignment]  # tuple.count is never asked for
    # Number of this process, from 0.
    index: int  # type: ignore[assignment]  # nor tuple.index
    local_devices: list[int] | None = None  # the numbers of its GPUs on the host; None: all that it sees

    @property
    def address(self) -> tuple[str, int]:
        """Host (an IPv6 address without brackets) and port of the first process."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


def find_place(coordinator: str | None, num_processes: int | str | None, process_id: int | str | None) -> Place | None:
    """The place of this process; None: it trains alone.

    Args:
        coordinator, num_processes, process_id: from the command line, all or none. `num_processes=1` by itself makes
            a process train alone, even if SLURM or a TPU pod started others with it.

    Raises:
        UserError: one of them is missing or invalid.
    """
    given = dict(zip(FLAGS, (coordinator, num_processes, process_id)))
    if all(value is None for value in given.values()):
        return _of_cluster()
    numbers = {name: _whole(name, given[name]) for name in FLAGS[1:] if given[name] is not None}
    if numbers.get("num_processes") == 1 and not numbers.get("process_id"):
        return None
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: --coordinator=HOST:PORT, "
            "--num_processes=N and --process_id=I belong together"
        )
    count, index = numbers["num_processes"], numbers["process_id"]
    if count < 1:
        raise UserError(f"--num_processes is {count}; it must be at least 1")
    if not 0 <= index < count:
        raise UserError(f"--process_id is {index}; of {count} processes it must be from 0 to {count - 1}")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise UserError(f"--coordinator is {coordinator!r}; it must be HOST:PORT of the first process")
    return Place(coordinator, count, index)


def _whole(name: str, text: int | str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,9}", str(text)):
        raise UserError(f"--{name} is {text!r}; it must be a whole number")
    return int(text)


def _of_cluster() -> Place | None:
    """The place that SLURM or a TPU pod gives this process; None: there is neither, or it is the only process."""
    try:
        from jax._src.clusters import ClusterEnv  # JAX has no public name for what `initialize` detects

        kinds = {kind.name: kind for kind in ClusterEnv._cluster_types}
    except (ImportError, AttributeError):  # another version of JAX
        return None
    for name in FOUND:
        if name in kinds and kinds[name].is_env_present() and (count := kinds[name].get_process_count()) > 1:
            address = kinds[name].get_coordinator_address(300, os.environ.get("JAX_COORDINATOR_PORT"))
            local_devices = _gpus_of_task() if name == "slurm" else None
            return Place(address, count, kinds[name].get_process_id(), local_devices)
    return None


def _gpus_of_task() -> list[int] | None:
    """The GPUs of a SLURM task. If several tasks on a host see all of its GPUs, each gets an equal share."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    tasks = _tasks_on_host(os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""), int(os.environ.get("SLURM_NODEID", 0)))
    share = len(visible) // tasks
    if tasks == 1 or share == 0:
        return None
    first = int(os.environ["SLURM_LOCALID"]) * share
    return list(range(first, first + share))


def _tasks_on_host(text: str, node: int) -> int:
    """The number of tasks on one node from SLURM's short form: '2(x3),1' is 2, 2, 2, 1; 1 if the text has no number."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    tasks = [int(number) for number, times in parts for _ in range(int(times or 1))]
    return tasks[node] if node < len(tasks) else 1
