"""Compiled programs of earlier starts, in the user's cache beside XLA's: who finds its own traces and compiles nothing.

XLA's cache knows a program by its text, which takes tracing and lowering to make: seconds for a deep network. Here it
is known by what the text depends on: the library's source, the configuration, the data, the machine, the versions of
all that is installed. A script or a notebook may have changed the library in memory, which no file tells; so only the
command line keeps programs, and only of methods and backbones of the library.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import pickle
import re
import sys
import sysconfig
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fedjax_ssl.files import read_whole, replaced
from fedjax_ssl.methods import METHODS, registered
from fedjax_ssl.models import BACKBONES
from fedjax_ssl.models.processor import description
from fedjax_ssl.run import hosts
from fedjax_ssl.run.choices import cache_folder
from fedjax_ssl.run.experiment import Experiment
from fedjax_ssl.run.machine import Machine

FOLDER = "programs"  # in the user's cache
MOST_BYTES = 500_000_000  # of all files; the oldest go
HIT = "/jax/compilation_cache/cache_hits"
LIBRARY = pathlib.Path(__file__).parents[1]

_is_wanted = False
_from_xla = threading.local()  # whether the last program that this thread compiled came from XLA's cache


def use_kept_programs() -> None:
    """From here on this process keeps its programs, and takes those of earlier ones; the command line calls this."""
    global _is_wanted
    if not _is_wanted:
        jax.monitoring.register_event_listener(_listen)
    _is_wanted = True


def _listen(event: str, **_: Any) -> None:
    if event == HIT:
        _from_xla.last = True


def compile_fresh(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, bool]:
    """Compiles a program; whether it can be kept: on a CPU one that XLA's cache had cannot be written again."""
    _from_xla.last = False
    return lowered.compile(), not _from_xla.last


def key_of(machine: Machine, experiments: Sequence[Experiment]) -> str | None:
    """What the programs of these runs depend on, as a name for a file; None where they are not kept.

    Args:
        machine: they run on.
        experiments: of the seeds that share the programs.
    """
    configs = [experiment.problem.config.to_dict() for experiment in experiments]
    if not (_is_wanted and _is_beside_xla() and _is_of_library(experiments[0])) or hosts.count() > 1:
        return None
    for config in configs:
        del config["log"]
    try:
        other_source = _loaded_source()
    except OSError:  # a file that was loaded is gone: nobody knows what it was
        return None
    installed = [found.metadata for found in importlib.metadata.distributions()]  # a file is read at each asking
    parts = {
        "library": hosts.checksum_of_library(),
        "other source": other_source,
        "installed": sorted(f"{found['Name']} {found['Version']}" for found in installed),
        "python": sys.version,
        "jax": {name: repr(value) for name, value in sorted(jax.config.values.items()) if "cache" not in name},
        "XLA": [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        "machine": repr(machine._replace(memory=None)),
        "devices": [(device.device_kind, device.id) for device in jax.devices()],
        "processor": description(),
        "configs": configs,
        "data": hosts.checksum([(experiment.data, experiment.hidden_labels) for experiment in experiments]),
        "networks": [repr((e.problem.num_classes, e.problem.network[1:5])) for e in experiments],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()[:32]


def _is_beside_xla() -> bool:
    """Whether XLA's cache is where the library puts it: who has JAX keep programs elsewhere, or not at all, decides."""
    return jax.config.jax_compilation_cache_dir == str(cache_folder() / "xla")


def _is_of_library(experiment: Experiment) -> bool:
    """Whether the method and the backbone are the library's, and no user's."""
    config = experiment.problem.config
    backbone = BACKBONES.get(config.model.name)
    is_ours = getattr(getattr(backbone, "func", backbone), "__module__", "").partition(".")[0] == LIBRARY.name
    return is_ours and config.method in METHODS and config.method not in registered()


def find(key: str | None, names: Sequence[str]) -> dict[str, Callable] | None:
    """The programs that were kept, by name; None unless all of them are there and can be read."""
    if key is None:
        return None
    try:
        from jax.experimental.serialize_executable import deserialize_and_load

        files = [_file(key, name) for name in names]
        if hasattr(os, "getuid") and any(file.stat().st_uid != os.getuid() for file in files):
            return None  # another user's, in a folder that all may write to: reading would run what is in it
        found = [pickle.loads(zlib.decompress(read_whole(file))) for file in files]
        programs = {name: deserialize_and_load(*parts) for name, parts in zip(names, found)}
        with contextlib.suppress(OSError):  # a folder that can only be read
            for file in files:
                file.touch()
    except Exception:  # of any kind: none, or not what was written; it can be made again
        return None
    return programs


def keep(key: str | None, programs: dict[str, jax.stages.Compiled]) -> None:
    """Writes programs for a later start; where that fails they are compiled again."""
    if key is None:
        return
    with contextlib.suppress(Exception):  # of any kind: a full disk, a backend whose programs cannot be written
        from jax.experimental.serialize_executable import serialize

        folder = cache_folder() / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        for name, program in programs.items():
            packed = zlib.compress(pickle.dumps(serialize(program)), level=1)
            with replaced(_file(key, name)) as file:
                file.write(packed)
        total = 0
        for file in sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True):
            total += file.stat().st_size
            if total > MOST_BYTES:
                file.unlink(missing_ok=True)


def _file(key: str, name: str) -> pathlib.Path:
    return cache_folder() / FOLDER / f"{key}-{re.sub(r'[^a-z]+', '_', name)}"


def _loaded_source() -> list[str]:
    """Checksums of the loaded files that are neither Python's, nor installed, nor the library's: a user's code."""
    installed = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    known = (*map(os.path.realpath, installed), str(LIBRARY))
    paths = {getattr(module, "__file__", None) for module in list(sys.modules.values())} - {None}
    others = sorted(path for path in map(os.path.realpath, paths) if not path.startswith(known))
    return [f"{path} {zlib.crc32(read_whole(pathlib.Path(path)))}" for path in others if path.endswith(".py")]
