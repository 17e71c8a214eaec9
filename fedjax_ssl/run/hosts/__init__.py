"""One run on several hosts, with one process on each.

Every process runs the same compiled programs in the same order, over the devices of all hosts. Only the first process
reads and writes the workdir and prints; it sends the others what it reads and decides. If a process fails or is
killed, the others print one line and end.

With a single process, nothing here has an effect.
"""

import contextlib
import json
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from fedjax_ssl.base.errors import TrainingError, UserError
from fedjax_ssl.base.fields import CHANGES_NO_RESULT
from fedjax_ssl.base.imports import CODE_FIELDS, is_own
from fedjax_ssl.config import differences, flatten, typed
from fedjax_ssl.records.origin import checksum_of_library
from fedjax_ssl.run.hosts.link import HostLink, find_cluster

CHUNK = 2**26  # 4-byte words in one message

_joined: HostLink | None = None


def count() -> int:
    """How many processes train together; 1 for a single process."""
    return 1 if _joined is None else _joined.count


def index() -> int:
    """Which of them this process is, from 0."""
    return 0 if _joined is None else _joined.index


def is_first() -> bool:
    """Whether this process reads and writes the workdir: the first of several, or the only one."""
    return index() == 0


@contextlib.contextmanager
def joined(
    coordinator: str | None = None, num_processes: int | str | None = None, process_id: int | str | None = None
) -> Iterator[None]:
    """A context in which this process trains together with those of other hosts. Enter it before JAX computes.

    Failed training or a signal ends the run in all processes together: the exception is raised once all have reached
    it. Any other exception in one process ends the others too; that process exits with status 1. A process whose
    partners have gone prints a line on stderr and exits by `os._exit`.

    Args:
        coordinator: HOST:PORT of the first process.
        num_processes: number of processes. 1 by itself makes a process train alone, whatever has started others.
        process_id: of this process, from 0. If all three are None, SLURM or the TPU pod provides them; without
            either, the process trains alone and nothing is done.

    Raises:
        UserError: the arguments are invalid, the processes cannot reach each other, or their libraries differ.
    """
    global _joined
    given = coordinator, _whole("num_processes", num_processes), _whole("process_id", process_id)
    cluster = find_cluster()
    if given == (None, 1, None) or (given == (None, None, None) and cluster is None):
        yield
        return
    if coordinator is not None and not re.fullmatch(r".+:[0-9]{1,5}", coordinator):
        raise UserError(f"--coordinator is {coordinator!r}; it must be HOST:PORT of the first process")
    link = _joined = HostLink(*given, cluster)
    ending = None
    try:
        try:
            check_same("the library's files", lambda: f"checksum {checksum_of_library()[:8]}")
            yield
        except (TrainingError, KeyboardInterrupt, SystemExit) as error:
            if not isinstance(error, TrainingError) and not link.stopping:
                raise  # no other process knows of it
            ending = error
        link.meet()  # the others are done, but the first may still save the state or draw a report
    except BaseException as error:
        link.fail(error)
        raise
    link.close()
    if ending is not None:
        raise ending  # the process stays one of several, so that only the first one prints the last line
    _joined = None


def _whole(name: str, text: int | str | None) -> int | None:
    """A number from the command line, or a UserError."""
    if text is not None and not re.fullmatch("[0-9]{1,9}", str(text)):
        raise UserError(f"--{name} is {text!r}; it must be a whole number")
    return None if text is None else int(text)


def from_first(find: Callable[[], Any]) -> Any:
    """What a function returns that only the first process calls, in all processes. It is JSON; tuples become lists."""
    if _joined is None:
        return find()
    return json.loads(_joined.meet(json.dumps(find()) if is_first() else "")[0])


def tree_from_first(find: Callable[[], Any], like: Any) -> Any:
    """Like `from_first`, for a tree of arrays on the host, of the structure of `like`. They travel bit for bit."""
    if _joined is None:
        return find()
    from jax.experimental import multihost_utils

    arrays = [np.asarray(array) for array in jax.tree.leaves(find())] if is_first() else []
    kinds = from_first(lambda: [[array.dtype.name, array.shape] for array in arrays])
    size = sum(np.dtype(name).itemsize * int(np.prod(shape)) for name, shape in kinds)
    words = np.zeros(-(-size // 4), np.uint32)  # adding zeros to integers is exact
    held = words.view(np.uint8)
    if is_first():
        held[:size] = np.frombuffer(b"".join(array.tobytes() for array in arrays), np.uint8)
    for start in range(0, len(words), CHUNK):
        words[start : start + CHUNK] = multihost_utils.broadcast_one_to_all(words[start : start + CHUNK])
    found, start = [], 0
    for name, shape in kinds:
        end = start + np.dtype(name).itemsize * int(np.prod(shape))
        found.append(held[start:end].view(np.dtype(name)).reshape(shape).copy())
        start = end
    return jax.tree.unflatten(jax.tree.structure(like), found)


def rows_of_all(rows: Any) -> Any:
    """Concatenates the rows of all processes, in all processes. Leaves are [n, ...], with the same n everywhere."""
    if _joined is None:
        return rows
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(rows, tiled=True)


def config_of_first(find: Callable[[], ConfigDict], allow_code: bool = False, is_given: bool = True) -> ConfigDict:
    """The first process's configuration, in all processes.

    Args:
        find: returns this process's own configuration. It is called in the first process, if `is_given` is true, and
            if the first process's configuration names code.
        allow_code: whether to run code that this process's own configuration does not name. What arrives over the
            network may not come from the first process.
        is_given: whether this process was given a configuration of its own, which must be the same.

    Raises:
        UserError: the configuration names such code, or the configurations differ.
    """
    if _joined is None:
        return find()
    config = find() if is_first() else None
    told = from_first(lambda: config.to_dict())
    if is_first():
        return config
    fields = flatten(told)
    named = [field for field in CODE_FIELDS if is_own(str(fields.get(field)))]
    if named and not allow_code:
        here = flatten(find())
        for field in named:
            if fields[field] != here.get(field):
                raise UserError(
                    f"host 0 names code, {field}={fields[field]}, which would be run; if you trust it, name it in this "
                    "process's configuration as well, or start the process with --allow_code"
                )
    if is_given:
        found = differences(told, json.loads(json.dumps(find().to_dict())))
        listed = [f"{name}: {found[name][1]!r}, not {found[name][0]!r}" for name in found.keys() - CHANGES_NO_RESULT]
        if listed:
            raise UserError(f"its configuration is not that of host 0 ({'; '.join(sorted(listed)[:5])})")
    return typed(told, "the configuration of host 0")


def check_same(what: str, find: Callable[[], str]) -> None:
    """Raises a UserError if a value, a short text, differs between processes; `what` is its name, a plural."""
    if _joined is None:
        return
    values = _joined.meet(find())
    other = next((index for index, value in enumerate(values) if value != values[0]), None)
    if other is not None:
        raise UserError(f"{what} of host {other} differ from those of host 0: {values[other]} there, {values[0]} here")


def checksum(tree: Any) -> str:
    """A checksum of arrays: different contents nearly always give different numbers."""
    found = 0
    for leaf in jax.tree.leaves(tree):
        content: Any = np.ascontiguousarray(leaf)  # a buffer
        found = zlib.crc32(content, found)
    return f"{found:08x}"


def any_signal(received: int | None) -> int | None:
    """A signal that any of the processes has received; None if none has."""
    if _joined is None:
        return received
    number = next((int(number) for number in _joined.meet(str(received or "")) if number), None)
    _joined.stopping = number is not None
    return number


def smallest(number: int | None) -> int | None:
    """The smallest number of all processes; None stands for an unknown number."""
    if _joined is None:
        return number
    known = [int(text) for text in _joined.meet("" if number is None else str(number)) if text]
    return min(known, default=None)
