"""How clients are laid out on a machine, which changes no result beyond rounding; what `tune` found is remembered."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from fedjax_ssl.files import read_json, replace_file
from fedjax_ssl.models.layers import LANE_FORMS

TUNED = "tuned.json"  # in the user's cache


class Choice(NamedTuple):
    """One way to train a cohort.

    Attributes:
        devices: how many share it.
        lanes: clients side by side on each of them; None: all that it has.
        lane_form: of `LANE_FORMS`, how convolutions of several lanes are computed; '': the backend's own.
        options: of XLA's compiler.
    """

    devices: int
    lanes: int | None
    lane_form: str = ""
    options: Mapping[str, Any] = {}

    def __str__(self) -> str:
        lanes = "all lanes" if self.lanes is None else f"{self.lanes} lane{'s' * (self.lanes > 1)}"
        form = f", {self.lane_form}" if self.lane_form else ""
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{self.devices} device{'s' * (self.devices > 1)}, {lanes} on each{form}{options}"


def cache_folder() -> pathlib.Path:
    """The user's folder for what can be made again."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "fedjax_ssl"


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
    path = cache_folder() / TUNED
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        known = dict(read_json(path))
    except (OSError, ValueError, TypeError):
        known = {}
    entry = {**choice._asdict(), "options": dict(choice.options)}
    replace_file(path, json.dumps({**known, _key(config, image_shape): entry}, indent=2) + "\n")
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
