"""The bridge to Flower: a ClientApp and a ServerApp made of the simulation's functions.

`fedjax_ssl.flower.client:app` and `fedjax_ssl.flower.server:app` are the two apps, which a project's pyproject.toml
names; configs/flower/ is one. They need the extra `flower`; nothing else of the library imports Flower.
"""

import importlib
from types import ModuleType

from fedjax_ssl.errors import UserError


def flower(module: str) -> ModuleType:
    """A module of Flower, such as 'flwr.app'.

    Raises:
        UserError: Flower is not installed, or is too old to have the module.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "flwr":
            raise
        raise UserError("Flower 1.41 or newer is not installed: pip install 'fedjax_ssl[flower]'") from None
