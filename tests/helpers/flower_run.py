"""A small run for the tests of the bridge to Flower; it does not need Flower."""

import pytest

from tests.helpers.runs import TINY_BACKBONE

try:
    import flwr
except ImportError:
    flwr = None
needs_flower = pytest.mark.skipif(flwr is None, reason="Flower is not installed: pip install '.[flower]'")

FIELDS = {
    "num_rounds": 2,
    "num_clients": 2,
    "clients_per_round": 2,
    "client.epochs": 1,
    "client.persistent": True,  # each client remembers its optimizer
    "server.epochs": 1,
    "server.pretrain_epochs": 1,
    "data.server_labels": 20,
    "data.examples_per_client": 33,
    "model.name": TINY_BACKBONE,
    "model.normalisation": "static",
    "augment.flavour": "none",
    "log.report": False,
}


def settings(method="fedanchor", **fields):
    """The quickstart's run config with a method and fields, made small."""
    words = [f"--config.{name}={value}" for name, value in {**FIELDS, **fields}.items()]
    return {"config": f"configs/quickstart.py:{method}", "overrides": " ".join(f"'{word}'" for word in words)}
