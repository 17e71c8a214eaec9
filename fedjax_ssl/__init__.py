"""Federated semi-supervised learning in JAX: a cohort of clients trained as lanes of one compiled program."""

import importlib
from typing import Any

from fedjax_ssl.errors import StoppedError, TrainingError, UserError

__all__ = [
    "Prediction",
    "Predictor",
    "State",
    "StoppedError",
    "TrainingError",
    "UserError",
    "base_config",
    "load",
    "load_config_file",
    "train",
    "use_every_core",
]

# Name -> module, imported when it is asked for: JAX takes seconds, and neither --help nor a typing error needs it.
_HOMES = {
    "Prediction": "predictor",
    "Predictor": "predictor",
    "State": "engine.interface",
    "base_config": "config",
    "load": "predictor",
    "load_config_file": "config",
    "train": "run.train",
    "use_every_core": "run.cores",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
