"""Optimisers by name: against NumPy from their papers' equations (LARS: test_fedcon.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import UserError, base_config
from fedjax_ssl.ops.sgd import make_optimizer

PARAMS, GRADIENTS = np.array([1.0, -2.0, 0.5]), [np.array([0.3, -0.1, 0.2]), np.array([-0.2, 0.4, 0.1])]


def steps(**fields):
    """The parameters after a step along each gradient."""
    config = base_config().client
    config.update({"clip_norm": 0.0, "momentum": 0.9, "weight_decay": 0.01, **fields})
    optimizer, params = make_optimizer(config, 0.1), jnp.asarray(PARAMS)
    state = optimizer.init(params)
    for gradient in GRADIENTS:
        updates, state = optimizer.update(jnp.asarray(gradient), state, params)
        params = params + updates
    return params


def test_adam_has_weight_decay_in_the_gradient():
    expected, first, second = PARAMS, 0.0, 0.0
    for number, gradient in enumerate(GRADIENTS, start=1):
        gradient = gradient + 0.01 * expected
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        corrected = (first / (1 - 0.9**number)) / (np.sqrt(second / (1 - 0.999**number)) + 1e-8)
        expected = expected - 0.1 * corrected
    np.testing.assert_allclose(steps(optimizer="adam"), expected, rtol=1e-5)


def test_the_classifier_may_be_spared():
    """Neither decay nor clipping: the length that is clipped is that of the other parts."""
    config = base_config().client
    config.update({"clip_norm": 0.05, "momentum": 0.0, "weight_decay": 0.5, "spare_classifier": True})
    optimizer, params = make_optimizer(config, 0.1), {name: jnp.asarray(PARAMS) for name in ("backbone", "classifier")}
    gradients = {"backbone": jnp.asarray(GRADIENTS[0]), "classifier": jnp.asarray(GRADIENTS[1])}
    state = optimizer.init(params)
    assert not jax.tree.leaves(state)  # without momentum there is nothing to keep
    updates, _ = optimizer.update(gradients, state, params)
    clipped = 0.05 * GRADIENTS[0] / np.linalg.norm(GRADIENTS[0])
    np.testing.assert_allclose(updates["backbone"], -0.1 * (clipped + 0.5 * PARAMS), rtol=1e-6)
    np.testing.assert_allclose(updates["classifier"], -0.1 * GRADIENTS[1], rtol=1e-6)
    config.optimizer = "lars"
    with pytest.raises(UserError, match="decays by its own rule"):
        make_optimizer(config, 0.1)
