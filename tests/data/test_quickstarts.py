"""The quickstarts of tables and texts: their data are read and divided, and a round can be traced."""

import jax
import pytest

from fedjax_ssl.config import parse_config
from fedjax_ssl.engine.round import make_round
from fedjax_ssl.run.experiment import build_experiment

pytestmark = pytest.mark.test_all

SMALL = {
    "num_clients": 4,
    "clients_per_round": 2,
    "data.examples_per_client": 12,
    "data.server_labels": 40,
    "model.width": 32,
}


@pytest.mark.parametrize(("kind", "method"), [("table", "fedanchor"), ("text", "fixmatch")])
def test_a_quickstart_has_a_round(root, kind, method):
    words = [f"--config.{field}={value}" for field, value in SMALL.items()]
    config = parse_config(str(root / "configs" / f"quickstart_{kind}.py"), words)
    experiment = build_experiment(config)
    assert experiment.dataset.kind == kind and config.method == method
    round_fn = make_round(experiment.problem, experiment.method, lanes=2)
    shapes = jax.eval_shape(round_fn, experiment.state_shape, experiment.data, experiment.hidden_labels)[1].metrics
    assert {"test_loss", "update_norm", "uploads"} <= set(shapes)
