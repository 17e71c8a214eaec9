"""How clients are laid out on a machine, which changes results by rounding only; and the cache of `tune`'s results."""

import contextlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from fedjax_ssl.base.files import cache_folder, make_folder, read_json, replace_file
from fedjax_ssl.models.passes import LANE_FORMS

TUNED, COMPILED = "tuned.json", "compiled.json"  # in the user's cache
MOST_KEPT = 200  # the newest entries that each file keeps


class Choice(NamedTuple):
    """One way to train a cohort."""

    devices: int  # devices that share the cohort
    lanes: int | None  # clients that train side by side on each device; None: all of its clients
    lane_form: str = ""  # of `LANE_FORMS`: how convolutions of several lanes are computed; '': the backend's default
    options: Mapping[str, Any] = {}  # options of XLA's compiler

    def __str__(self) -> str:
        lanes = "all lanes" if self.lanes is None else f"{self.lanes} lane{'s' * (self.lanes > 1)}"
        form = f", {self.lane_form}" if self.lane_form else ""
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{self.devices} device{'s' * (self.devices > 1)}, {lanes} on each{form}{options}"


def recall(config: ConfigDict, image_shape: tuple[int, ...]) -> Choice | None:
    """The fastest choice that `tune` measured for such a run on such a machine; None: nothing was measured.

    Args:
        config: the run's; the method, the model, the cohort and the batch size are read.
        image_shape: (height, width, channels).
    """
    try:
        entry = read_json(cache_folder() / TUNED)[_key(config, image_shape)]
        lanes = None if entry["lanes"] is None else int(entry["lanes"])
        choice = Choice(int(entry["devices"]), lanes, entry["lane_form"], dict(entry["options"]))
    except (OSError, ValueError, KeyError, TypeError):  # no file, or a damaged one, which `remember` replaces
        return None
    fits = 1 <= choice.devices <= jax.device_count() and (lanes is None or lanes >= 1)
    return choice if fits and choice.lane_form in ("", *LANE_FORMS) else None


def remember(config: ConfigDict, image_shape: tuple[int, ...], choice: Choice) -> pathlib.Path:
    """Stores a choice for runs like this one, see `recall`; returns the file."""
    entry = {**choice._asdict(), "options": dict(choice.options)}
    return _keep(TUNED, _key(config, image_shape), entry)


def is_cached_here() -> bool:
    """Whether JAX caches compiled programs in the user's cache folder, and not where the user has told it to."""
    return jax.config.values["jax_compilation_cache_dir"] == str(cache_folder() / "xla")


def recall_seconds(config: ConfigDict, image_shape: tuple[int, ...]) -> float | None:
    """Seconds that compiling took last time for such a run, see `recall`; None: unknown."""
    try:
        return float(read_json(cache_folder() / COMPILED)[_key(config, image_shape)])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember_seconds(config: ConfigDict, image_shape: tuple[int, ...], seconds: float) -> None:
    """Stores the seconds that compiling took. Does nothing if the cache cannot be written."""
    with contextlib.suppress(OSError):
        _keep(COMPILED, _key(config, image_shape), round(seconds, 1))


def _keep(name: str, key: str, entry: Any) -> pathlib.Path:
    """Adds an entry to a file in the user's cache, removes the oldest entries and returns the file."""
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
    """Everything that the speed of a client's step depends on, as text."""
    device, encoder = jax.devices()[0], config.encoder
    parts = {
        "device": f"{device.device_kind} x {jax.device_count()}",
        "cores": os.cpu_count() if device.platform == "cpu" else None,
        "jax": jax.__version__,
        "method": config.method,
        "model": "{name} {width} {depth} {patch} {normalisation} {dtype}".format(**config.model.to_dict()),
        "encoder": None if encoder.name == "none" else f"{encoder.name} {encoder.side} {encoder.adapters.to_dict()}",
        "images": "x".join(map(str, image_shape)),
        "clients": config.clients_per_round,
        "batch": config.client.batch_size,
    }
    return ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)
