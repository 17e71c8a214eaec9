"""The bridge to Flower: the workdir at the server."""

import contextlib
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
from tests.helpers.stub import STUB, STUB_BACKBONE

QUICK = {"method": STUB, "model.name": STUB_BACKBONE, "model.normalisation": "none", "client.persistent": False}


@needs_flower
def test_a_flower_run_is_not_resumed_as_a_simulation(tmp_path, monkeypatch):
    """Nodes may have other images than the configured data set. `~` is the home folder, as on the command line."""
    from fedjax_ssl.flower.records import Records

    monkeypatch.setenv("HOME", str(tmp_path))
    experiment = outline(run_config(settings(**QUICK)))
    with contextlib.closing(Records("~/run", experiment)) as folder:
        folder.begin(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), experiment.state_shape))
    for resumed in (lambda: train(experiment.problem.config, "~/run"), lambda: Records("~/run", experiment)):
        with pytest.raises(UserError, match=f"the run in {tmp_path}/run is a Flower run, which cannot be resumed"):
            resumed()


@pytest.mark.test_all
@needs_flower
def test_the_records_of_a_run_with_validation_images(tmp_path):
    """The summary has the test accuracy of the last model."""
    from fedjax_ssl.flower.server import main
    from tests.helpers.flower_by_hand import GridByHand

    run = settings(**QUICK, num_rounds=1, **{"data.validation": 50})
    run |= {"workdir": str(tmp_path / "run"), "wait": 0}
    main(GridByHand(run, [{"clients": "0,1"}]), SimpleNamespace(run_config=run))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    dataset = outline(run_config(run)).dataset
    predicted, rows = load(tmp_path / "run", allow_code=True)(dataset.x_test), np.arange(len(dataset.y_test))
    assert summary["test_accuracy"] == pytest.approx(np.mean(predicted.labels == dataset.y_test))
    losses = -np.log(np.asarray(predicted.probabilities, float)[rows, dataset.y_test])
    assert summary["test_loss"] == pytest.approx(losses.mean(), rel=1e-3)
    assert 0 < summary["validation_accuracy"] < 1
    assert json.loads((tmp_path / "run" / "timings.jsonl").read_text())["seconds"] > 0
