"""One step of SGD against NumPy: which parts it trains, and in which order clipping, decay and momentum come."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.ops import sgd
from fedjax_ssl.ops.sgd import Model, make_optimizer
from tests.helpers.linear_network import at_rest, sgd_step


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("clip_norm", [0.0, 1.5])
def test_steps_equal_numpy(nesterov, clip_norm):
    """Three steps on 1/2 |w - target|^2 of two leaves; the part that is not named stays, without weight decay."""
    config = types.SimpleNamespace(
        optimizer="sgd", momentum=0.8, nesterov=nesterov, weight_decay=0.1, clip_norm=clip_norm
    )
    target = {"bias": np.array([3.0, -1.0]), "kernel": np.array([[0.5], [2.0]])}
    model = {"bias": np.array([0.2, 0.1]), "kernel": np.array([[-1.0], [1.5]])}
    params = {**jax.tree.map(jnp.float32, model), "head": jnp.array([7.0])}

    def loss_fn(found):
        squares = [jnp.sum(jnp.square(found.params[name] - target[name])) for name in target]
        value = 0.5 * sum(squares) + jnp.sum(found.params["head"])
        return value, ({"count": found.batch_stats["count"] + 1}, value)

    optimizer = make_optimizer(config, 0.3)
    learner = sgd.start(optimizer, Model(params, {"count": jnp.int32(0)}), ("bias", "kernel"))
    step = jax.jit(lambda learner: sgd.step(loss_fn, optimizer, learner, ("bias", "kernel")))
    velocity = at_rest(model)
    for number in range(3):
        gradient = {name: model[name] - target[name] for name in model}
        value = 0.5 * sum(np.sum(leaf**2) for leaf in gradient.values()) + 7
        model, velocity = sgd_step(model, gradient, velocity, config, 0.3)
        learner, aux = step(learner)
        np.testing.assert_allclose(aux, value, rtol=1e-5)
        for name, leaf in model.items():
            np.testing.assert_allclose(learner.model.params[name], leaf, rtol=1e-5, atol=1e-6)
        assert learner.model.batch_stats["count"] == number + 1
    assert learner.model.params["head"] == 7.0
