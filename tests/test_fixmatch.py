"""FixMatch's server in parallel, and its local steps, against NumPy and a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import TINY_BACKBONE, make_tiny_config
from fedjax_ssl.aggregation import OPT_STATE
from fedjax_ssl.config import apply_arguments, validate
from fedjax_ssl.experiment import build_experiment
from fedjax_ssl.local_training import ModelUpload
from fedjax_ssl.method import Received, State
from fedjax_ssl.server_model import SERVER_MODEL, ServerModel


def build(**overrides):
    fields = {"model.name": TINY_BACKBONE, "model.normalisation": "running", **overrides}
    config = apply_arguments(make_tiny_config(**fields), "fixmatch")
    validate(config)
    experiment = build_experiment(config)
    return experiment, State(jnp.int32(0), *experiment.problem.network.init(jax.random.key(0)))


def flat(tree):
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize("optimizer, momentum", [("fedavg", 0.0), ("fedavgm", 0.5)])
def test_a_server_in_parallel_has_half_the_weight_before_the_server_optimiser(optimizer, momentum):
    """v <- beta v + (w - mean), w <- w - v, the mean of the server's model and of the clients' mean, half and half."""
    experiment, state = build(**{"fixmatch.server": "parallel", "aggregation.optimizer": optimizer})
    shapes = experiment.state_shape.server.get(OPT_STATE, ())
    rng = np.random.default_rng(0)
    noise = lambda tree, *axes: jax.tree.map(  # noqa: E731
        lambda leaf: jnp.float32(rng.normal(size=(*axes, *leaf.shape))), tree
    )
    state = state._replace(server={OPT_STATE: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)})
    sizes, w, v = jnp.array([30, 99, 10]), flat(state.params), 0.0
    for accepted in ([True, False, True], [False, False, False], [True, True, True]):
        own = ServerModel(noise(state.params), noise(state.batch_stats))
        uploads = ModelUpload(noise(state.params, 3), noise(state.batch_stats, 3))
        state = state._replace(server={**state.server, SERVER_MODEL: own})
        state, metrics = experiment.method.aggregate(state, Received(uploads, jnp.array(accepted), sizes, sizes))

        weights = np.where(accepted, sizes, 0) / max(np.sum(np.where(accepted, sizes, 0)), 1)
        half = 0.5 if any(accepted) else 0.0
        means = []
        for part in (0, 1):
            rows = np.stack([flat(jax.tree.map(lambda leaf, m=m: leaf[m], uploads[part])) for m in range(3)])
            means.append(half * weights @ rows + (1 - half) * flat(own[part]))
        before, v = w, momentum * v + (w - means[0])
        w = w - v
        np.testing.assert_allclose(flat(state.params), w, atol=1e-5)
        np.testing.assert_allclose(flat(state.batch_stats), means[1], atol=1e-5)
        np.testing.assert_allclose(metrics["update_norm"], np.linalg.norm(w - before), rtol=1e-5)
