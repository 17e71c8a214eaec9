"""Disk cache of compiled programs, beside XLA's: a start that finds its own neither traces nor compiles.

XLA's cache knows a program by its text, which takes tracing and lowering to make: seconds for a deep network. Here it
is known by what the text depends on: the library's source, the configuration, the data, the machine, the versions of
all that is installed. A script or a notebook may have changed the library in memory, which no file tells; so only the
command line keeps programs, and only of methods and backbones of the library.

A kept program is code, in a pickle. It is read only if this user alone can have written it: by the owner and the mode
of the file and of all folders above it, not through a link, and by an HMAC with a secret of this user.
"""

import contextlib
import hashlib
import hmac
import json
import os
import pathlib
import pickle
import re
import secrets
import stat
import sys
import threading
import zlib
from collections.abc import Sequence
from typing import Any

import jax

from fedjax_ssl.files import read_whole, replaced
from fedjax_ssl.imports import is_own
from fedjax_ssl.methods import METHODS, registered
from fedjax_ssl.models import BACKBONES
from fedjax_ssl.models.cpu.processor import description
from fedjax_ssl.records.origin import loaded_files, packages
from fedjax_ssl.run import hosts
from fedjax_ssl.run.choices import cache_folder, private_cache
from fedjax_ssl.run.experiment import Experiment
from fedjax_ssl.run.machine import Machine

FOLDER = "programs"  # in the user's cache
MOST_BYTES = 500_000_000  # of all files; those that were used longest ago go
SECRET, DIGEST_BYTES = "secret", 32
HIT = "/jax/compilation_cache/cache_hits"

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
    if not (may_keep() and _is_of_library(experiments[0])) or hosts.count() > 1:
        return None
    for config in configs:
        del config["log"]
    try:
        other_source = _loaded_source()
    except OSError:  # a file that was loaded is gone: nobody knows what it was
        return None
    parts = {
        "library": hosts.checksum_of_library(),
        "other source": other_source,
        "installed": packages(),
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


def may_keep() -> bool:
    """Whether this process keeps programs, and what it has learnt of them, in the user's cache."""
    return _is_wanted and _is_beside_xla()


def _is_beside_xla() -> bool:
    """Whether XLA's cache is where the library puts it: who has JAX keep programs elsewhere, or not at all, decides."""
    return jax.config.values["jax_compilation_cache_dir"] == str(cache_folder() / "xla")


def _is_of_library(experiment: Experiment) -> bool:
    """Whether the method, the backbone and the rule for confidence are the library's, and no user's."""
    config = experiment.problem.config
    backbone = BACKBONES.get(config.model.name)
    is_ours = getattr(getattr(backbone, "func", backbone), "__module__", "").partition(".")[0] == "fedjax_ssl"
    is_ours = is_ours and not is_own(config.confidence.kind)
    return is_ours and config.method in METHODS and config.method not in registered()


def find(key: str | None, names: Sequence[str]) -> dict[str, jax.stages.Compiled]:
    """The programs that were kept, by name; without those that are not there, or not what this user wrote."""
    folder = None if key is None else private_cache(FOLDER, MOST_BYTES)
    found = {}
    for name in names if folder is not None else ():
        with contextlib.suppress(Exception):  # of any kind: it can be made again
            from jax.experimental.serialize_executable import deserialize_and_load

            file = folder / _name(key, name)
            content = _read(file)
            if not hmac.compare_digest(content[:DIGEST_BYTES], _digest(folder, file.name, content[DIGEST_BYTES:])):
                continue
            # Unpickling runs what a file says, and so do programs: this user wrote it, as the digest shows.
            found[name] = deserialize_and_load(*pickle.loads(zlib.decompress(content[DIGEST_BYTES:])))
            with contextlib.suppress(OSError):  # a folder that can only be read
                os.utime(file)
    return found


def compile_and_keep(lowered: jax.stages.Lowered, key: str | None, name: str) -> jax.stages.Compiled:
    """Compiles a program, and keeps it for a later start, whatever becomes of the others."""
    program, can_be_kept = compile_fresh(lowered)
    if can_be_kept:
        keep(key, name, program)
    return program


def keep(key: str | None, name: str, program: jax.stages.Compiled) -> None:
    """Writes a program for a later start; where that fails it is compiled again."""
    with contextlib.suppress(Exception):  # of any kind: a full disk, a backend whose programs cannot be written
        from jax.experimental.serialize_executable import serialize

        folder = None if key is None else private_cache(FOLDER, MOST_BYTES)
        if folder is None:
            return
        packed = zlib.compress(pickle.dumps(serialize(program)), level=1)
        file = folder / _name(key, name)
        digest = _digest(folder, file.name, packed, make=True)
        with replaced(file) as opened:
            os.fchmod(opened.fileno(), 0o600)
            opened.write(digest + packed)


def _name(key: str, name: str) -> str:
    return f"{key}-{re.sub(r'[^a-z]+', '_', name)}"


def _read(file: pathlib.Path) -> bytes:
    """A file's bytes.

    Raises:
        OSError: it cannot be read, or is a link, or another user's, or others can write into it.
    """
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
        state = os.fstat(opened.fileno())
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
            raise PermissionError(f"{file} may not be this user's")
        return opened.read()


def _digest(folder: pathlib.Path, name: str, content: bytes, make: bool = False) -> bytes:
    """The HMAC of a file's name and content by the secret that lies beside it, which only this user can read.

    Args:
        make: whether the secret is made where there is none.

    Raises:
        OSError, ValueError: there is no secret that can be used.
    """
    file = folder / SECRET
    if make and not file.exists():
        with contextlib.suppress(FileExistsError):  # another process was quicker
            number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(number, "wb") as opened:
                opened.write(secrets.token_bytes(DIGEST_BYTES))
    secret = _read(file)
    if len(secret) != DIGEST_BYTES or file.stat().st_mode & 0o077:
        raise ValueError("no secret")
    return hmac.digest(secret, name.encode() + b"\0" + content, "sha256")


def _loaded_source() -> list[str]:
    """Checksums of the loaded files that are neither Python's, nor installed, nor the library's: a user's code."""
    return [f"{path} {zlib.crc32(read_whole(pathlib.Path(path)))}" for path in loaded_files()]
