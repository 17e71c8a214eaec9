"""The bridge to Flower: the workdir at the server."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from fedjax_ssl import load, train
from fedjax_ssl.base.errors import UserError
from fedjax_ssl.flower.settings import run_config
from fedjax_ssl.flower.views import outline
from tests.helpers.flower_run import needs_flower, settings


@needs_flower
def test_a_flower_run_is_not_resumed_as_a_simulation(tmp_path, monkeypatch):
    """Nodes may have other images than the configured data set. `~` is the home folder, as on the command line."""
    from fedjax_ssl.flower.records import Records

    monkeypatch.setenv("HOME", str(tmp_path))
    experiment = outline(run_config(settings(**{"client.persistent": False})))
    with Records("~/run", experiment) as folder:
        folder.begin(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), experiment.state_shape))
    for resumed in (lambda: train(experiment.problem.config, "~/run"), lambda: Records("~/run", experiment)):
        with pytest.raises(UserError, match=f"the run in {tmp_path}/run is a Flower run, which cannot be resumed"):
            resumed()


@needs_flower
def test_the_records_of_a_run_with_validation_images(tmp_path):
    """The summary has the test accuracy of the last model. No time is negative, whatever a node tells of compiling."""
    from fedjax_ssl.flower.server import main
    from tests.helpers.flower_by_hand import GridByHand

    run = settings(**{"num_rounds": 1, "data.validation": 50, "client.persistent": False})
    run |= {"workdir": str(tmp_path / "run"), "wait": 0}
    grid = GridByHand(run, [{"clients": "0,1"}])

    def change(node, kind, content):
        if kind == "train":
            content["seconds"]["compiling"] = 2e9

    grid.change = change
    main(grid, SimpleNamespace(run_config=run))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    dataset = outline(run_config(run)).dataset
    predicted = load(tmp_path / "run", allow_code=True)(dataset.x_test).labels
    assert summary["test_accuracy"] == pytest.approx(np.mean(predicted == dataset.y_test))
    assert 0 < summary["test_loss"] < 10 and 0 < summary["validation_accuracy"] < 1
    timing = json.loads((tmp_path / "run" / "timings.jsonl").read_text())
    assert timing["seconds"] == 0 < timing["compile_seconds"]
