"""Federated semi-supervised learning in JAX: a cohort of clients trained as lanes of one compiled program."""

import importlib
from typing import TYPE_CHECKING, Any

from fedjax_ssl.base.errors import StoppedError, TrainingError, UserError

if TYPE_CHECKING:  # for editors and type checkers; at run time __getattr__ imports these
    from fedjax_ssl.config import base_config, load_config_file
    from fedjax_ssl.engine.interface import State
    from fedjax_ssl.run.cores import use_every_core
    from fedjax_ssl.run.train import train
    from fedjax_ssl.serve.predictor import Prediction, Predictor, load

    __version__: str

__all__ = [
    "Prediction", "Predictor", "State", "StoppedError", "TrainingError", "UserError", "__version__", "base_config",
    "load", "load_config_file", "train", "use_every_core",
]  # fmt: skip

# Name -> module, imported at first use: importing JAX takes seconds, and --help or a mistyped command does not need it.
_HOMES = {
    **dict.fromkeys(("Prediction", "Predictor", "load"), "serve.predictor"),
    **dict.fromkeys(("base_config", "load_config_file"), "config"),
    "State": "engine.interface",
    "train": "run.train",
    "use_every_core": "run.cores",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata

        try:
            return metadata.version(__name__)
        except metadata.PackageNotFoundError:
            return "0+unknown"  # the library is in the path but not installed
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    except AttributeError as error:  # of packages that do not fit; `from fedjax_ssl import NAME` would not show it
        raise ImportError(f"fedjax_ssl.{name} cannot be imported: {error}") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
