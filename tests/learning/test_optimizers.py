"""Optimisers by name: against NumPy from their papers' equations, and what cannot be used is refused in one line."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import UserError, base_config
from fedjax_ssl.learning.sgd import make_optimizer
from fedjax_ssl.run.validation import validate

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


def test_adam_has_its_options_and_weight_decay_in_the_gradient():
    expected, first, second = PARAMS, 0.0, 0.0
    for number, gradient in enumerate(GRADIENTS, start=1):
        gradient = gradient + 0.01 * expected
        first, second = 0.8 * first + 0.2 * gradient, 0.999 * second + 0.001 * gradient**2
        corrected = (first / (1 - 0.8**number)) / (np.sqrt(second / (1 - 0.999**number)) + 1e-8)
        expected = expected - 0.1 * corrected
    np.testing.assert_allclose(steps(optimizer="adam(b1=0.8)"), expected, rtol=1e-5)


def test_lars_gets_momentum_and_decays_by_its_own_rule():
    """You et al., 2017: the gradient with decay is scaled by a trust ratio |w| / |g|, then comes the momentum."""
    expected, velocity = PARAMS, 0.0
    for gradient in GRADIENTS:
        decayed = gradient + 0.01 * expected
        scaled = 0.02 * np.linalg.norm(expected) / np.linalg.norm(decayed) * decayed
        velocity = 0.9 * velocity + 0.1 * scaled
        expected = expected - velocity
    np.testing.assert_allclose(steps(optimizer="lars(trust_coefficient=0.02)"), expected, rtol=1e-5)


def test_the_gradient_is_clipped_before_anything_else():
    gradient = GRADIENTS[0] / np.linalg.norm(GRADIENTS[0]) * 0.05
    second = GRADIENTS[1] / np.linalg.norm(GRADIENTS[1]) * 0.05
    expected = PARAMS - 0.1 * gradient - 0.1 * (0.9 * gradient + second)
    np.testing.assert_allclose(steps(clip_norm=0.05, weight_decay=0.0), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "name, words",
    [
        ("adem", "client.optimizer 'adem' is not an optimizer of optax with a learning rate"),
        ("sam", "not an optimizer of optax with a learning rate"),
        ("lbfgs", "client.optimizer='lbfgs' cannot be used: its step may only need a learning rate, gradients"),
        ("adam(b1=0.5", "must be NAME or NAME"),
        ("adam(1)", "must be NAME or NAME"),
        ("adam(momentum=1)", "'adam' takes no 'momentum'; known: learning_rate, b1"),
        ("sgd(momentum=1)", "'sgd' takes no options"),
        ("", "must be NAME or NAME"),
    ],
)
def test_what_cannot_be_used_is_refused(name, words):
    config = base_config()
    config.client.optimizer = name
    with pytest.raises(UserError, match=words) as refusal:
        validate(config)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("section", ["client", "server"])
def test_a_state_that_remembers_parameters_is_not_kept_for_another_model(section):
    config = base_config()
    config[section].optimizer = "schedule_free_sgd"
    config[section].persistent = False
    validate(config)
    config[section].persistent = True
    with pytest.raises(UserError, match=rf"keeps parameters in its state, so it is not for {section}\.persistent=True"):
        validate(config)
    config[section].optimizer = "adam"
    validate(config)


def test_the_classifier_may_be_spared():
    """Neither decay nor clipping: the length that is clipped is that of the other parts."""
    config = base_config().client
    config.update({"clip_norm": 0.05, "momentum": 0.0, "weight_decay": 0.5, "spare_classifier": True})
    optimizer, params = make_optimizer(config, 0.1), {name: jnp.asarray(PARAMS) for name in ("backbone", "classifier")}
    gradients = {"backbone": jnp.asarray(GRADIENTS[0]), "classifier": jnp.asarray(GRADIENTS[1])}
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    clipped = 0.05 * GRADIENTS[0] / np.linalg.norm(GRADIENTS[0])
    np.testing.assert_allclose(updates["backbone"], -0.1 * (clipped + 0.5 * PARAMS), rtol=1e-6)
    np.testing.assert_allclose(updates["classifier"], -0.1 * GRADIENTS[1], rtol=1e-6)
    config.optimizer = "lars()"
    with pytest.raises(UserError, match="decays by its own rule"):
        make_optimizer(config, 0.1)
