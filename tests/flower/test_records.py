"""The bridge to Flower: the workdir at the server."""

import jax
import numpy as np
import pytest

from fedjax_ssl import train
from fedjax_ssl.errors import UserError
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
