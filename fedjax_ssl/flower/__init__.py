"""The bridge to Flower: a ClientApp and a ServerApp built from the simulation's functions.

A project's pyproject.toml names the two apps, `fedjax_ssl.flower.client:app` and `fedjax_ssl.flower.server:app`;
configs/flower/ is an example. They need the extra `flower`; the rest of the library does not import Flower.
"""

import importlib
from types import ModuleType

from fedjax_ssl.base.errors import UserError


def flower(module: str) -> ModuleType:
    """Imports a module of Flower, such as 'flwr.app'.

    Raises UserError if Flower is not installed, or is too old to have the module.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "flwr":
            raise
        raise UserError("Flower 1.41 or newer is not installed: pip install 'fedjax_ssl[flower]'") from None
