"""How clients are laid out on a machine, which changes no result beyond rounding; what `tune` found is remembered."""

import contextlib
import json
import os
import pathlib
import stat
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from fedjax_ssl.files import make_folder, read_json, replace_file
from fedjax_ssl.models.passes import LANE_FORMS

TUNED, COMPILED = "tuned.json", "compiled.json"  # in the user's cache
MOST_KEPT = 200  # entries of each, the newest


class Choice(NamedTuple):
    """One way to train a cohort."""

    devices: int  # how many share it
    lanes: int | None  # clients side by side on each of them; None: all that it has
    lane_form: str = ""  # of `LANE_FORMS`, how convolutions of several lanes are computed; '': the backend's own
    options: Mapping[str, Any] = {}  # of XLA's compiler

    def __str__(self) -> str:
        lanes = "all lanes" if self.lanes is None else f"{self.lanes} lane{'s' * (self.lanes > 1)}"
        form = f", {self.lane_form}" if self.lane_form else ""
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{self.devices} device{'s' * (self.devices > 1)}, {lanes} on each{form}{options}"


def cache_folder() -> pathlib.Path:
    """The user's folder for what can be made again."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "fedjax_ssl"


def private_cache(name: str, most_bytes: int) -> pathlib.Path | None:
    """A folder in the user's cache for compiled programs, made if it is not there.

    Compiled programs are code, so no other user may write there or into a folder above. The files that were
    used longest ago are removed.

    Args:
        name: of the folder.
        most_bytes: of all its files.

    Returns:
        The folder; None if others can write there, or it cannot be made, or the system cannot say (Windows).
    """
    folder = cache_folder() / name
    try:
        cache_folder().parent.mkdir(parents=True, exist_ok=True)
        for place in (cache_folder(), folder):
            place.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or not _is_ours_alone(folder):
            return None
        files = [(entry.stat(follow_symlinks=False), entry.path) for entry in os.scandir(folder)]
        total = 0
        for state, path in sorted(files, key=lambda file: max(file[0].st_atime, file[0].st_mtime), reverse=True):
            total += state.st_size
            if total > most_bytes:
                os.unlink(path)
    except OSError:
        return None
    return folder


def _is_ours_alone(folder: pathlib.Path) -> bool:
    """Whether no other user but root can put files into a folder, or another folder in its place."""
    if not hasattr(os, "getuid"):
        return False
    own, real = os.getuid(), pathlib.Path(os.path.realpath(folder))
    for place in (real, *real.parents):
        state = place.stat()
        if state.st_uid not in (own, 0):
            return False
        of_group = (
            state.st_mode & stat.S_IWGRP and state.st_gid != own
        )  # a user's own group has often the user's number
        if (of_group or state.st_mode & stat.S_IWOTH) and not state.st_mode & stat.S_ISVTX:
            return False
    return True


def recall(config: ConfigDict, image_shape: tuple[int, ...]) -> Choice | None:
    """What was measured to be fastest for such a run on such a machine; None if nothing was.

    Args:
        config: of the run; the method, the model, the cohort and the batch are read.
        image_shape: (height, width, channels).
    """
    try:
        entry = read_json(cache_folder() / TUNED)[_key(config, image_shape)]
        lanes = None if entry["lanes"] is None else int(entry["lanes"])
        choice = Choice(int(entry["devices"]), lanes, entry["lane_form"], dict(entry["options"]))
    except (OSError, ValueError, KeyError, TypeError):  # none, or not what `remember` wrote: it can be made again
        return None
    fits = 1 <= choice.devices <= jax.device_count() and (lanes is None or lanes >= 1)
    return choice if fits and choice.lane_form in ("", *LANE_FORMS) else None


def remember(config: ConfigDict, image_shape: tuple[int, ...], choice: Choice) -> pathlib.Path:
    """Keeps a choice for runs like this one, see `recall`; returns the file."""
    entry = {**choice._asdict(), "options": dict(choice.options)}
    return _keep(TUNED, _key(config, image_shape), entry)


def is_cached_here() -> bool:
    """Whether JAX keeps its programs in the user's cache, and nobody has sent them elsewhere."""
    return jax.config.values["jax_compilation_cache_dir"] == str(cache_folder() / "xla")


def recall_seconds(config: ConfigDict, image_shape: tuple[int, ...]) -> float | None:
    """How long compiling took the last time for such a run, see `recall`; None if that is not known."""
    try:
        return float(read_json(cache_folder() / COMPILED)[_key(config, image_shape)])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember_seconds(config: ConfigDict, image_shape: tuple[int, ...], seconds: float) -> None:
    """Keeps how long compiling took; where the cache cannot be written, nothing."""
    with contextlib.suppress(OSError):
        _keep(COMPILED, _key(config, image_shape), round(seconds, 1))


def _keep(name: str, key: str, entry: Any) -> pathlib.Path:
    """Adds an entry to a file in the user's cache, whose oldest go; returns the file."""
    path = cache_folder() / name
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    make_folder(path.parent)
    try:
        known = {other: value for other, value in dict(read_json(path)).items() if other != key}
    except (OSError, ValueError, TypeError):
        known = {}
    newest = dict([*known.items(), (key, entry)][-MOST_KEPT:])
    replace_file(path, json.dumps(newest, indent=2) + "\n")
    return path


def _key(config: ConfigDict, image_shape: tuple[int, ...]) -> str:
    """What the speed of a client's step depends on, in words."""
    device = jax.devices()[0]
    parts = {
        "device": f"{device.device_kind} x {jax.device_count()}",
        "cores": os.cpu_count() if device.platform == "cpu" else None,
        "jax": jax.__version__,
        "method": config.method,
        "model": "{name} {width} {normalisation} {dtype}".format(**config.model.to_dict()),
        "images": "x".join(map(str, image_shape)),
        "clients": config.clients_per_round,
        "batch": config.client.batch_size,
    }
    return ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)
