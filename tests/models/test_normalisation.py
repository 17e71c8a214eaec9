"""The three normalisation policies against NumPy, with padding rows and several views."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.devices import use_platform
from fedjax_ssl.models.normalisation import EPSILON, Normalisation, batch_normalise, number_of_groups

# Two views of ten rows, of which ten and three are valid.
MASK = np.arange(20) < 13
SCALE, BIAS = jnp.array([1.0, 2.0, -1.0]), jnp.array([0.0, 1.0, 0.5])
PARAMS = {"scale": SCALE, "bias": BIAS}
OLD = {"mean": jnp.array([1.0, 2.0, 3.0]), "var": jnp.array([4.0, 5.0, 6.0])}


@pytest.fixture(scope="module")
def x():
    return 3 + 2 * jax.random.normal(jax.random.key(0), (20, 2, 3, 3))


def moments(x):
    """Mean, biased variance and unbiased variance of NumPy, over valid rows [n, ..., C]."""
    values = np.asarray(x, np.float64).reshape(-1, x.shape[-1])
    return values.mean(axis=0), values.var(axis=0), values.var(axis=0, ddof=1)


def normalised(x, mean, var):
    return (np.asarray(x, np.float64) - mean) / np.sqrt(var + EPSILON) * np.asarray(SCALE) + np.asarray(BIAS)


def train(policy, x, mask=None, num_views=1, batch_stats=OLD):
    variables = {"params": PARAMS, "batch_stats": batch_stats}
    apply = jax.jit(Normalisation(policy).apply, static_argnums=(2, 4), static_argnames="mutable")
    y, state = apply(variables, x, True, mask, num_views, mutable="batch_stats")
    return y, state["batch_stats"]


@pytest.mark.parametrize("policy", ["static", "running"])
def test_views_and_padding_equal_separate_unpadded_batches(policy, x):
    y, batch_stats = train(policy, x, MASK, num_views=2)
    first, second = moments(x[:10]), moments(x[10:13])
    np.testing.assert_allclose(y[:10], normalised(x[:10], *first[:2]), atol=1e-5)
    np.testing.assert_allclose(y[10:13], normalised(x[10:13], *second[:2]), atol=1e-5)
    for name, index in (("mean", 0), ("var", 2)):
        if policy == "static":
            expected = (first[index] + second[index]) / 2
        else:
            expected = 0.9 * (0.9 * OLD[name] + 0.1 * first[index]) + 0.1 * second[index]
        np.testing.assert_allclose(batch_stats[name], expected, rtol=1e-5)


@pytest.mark.parametrize(("mask", "platform"), [(None, "cpu"), (MASK, "cpu"), (MASK, "tpu")])
def test_gradient_equals_automatic_differentiation(mask, platform, x):
    direction = jax.random.normal(jax.random.key(1), x.shape)
    valid = jnp.ones(20) if mask is None else jnp.asarray(mask, jnp.float32)

    def ours(x, scale, bias):
        y = batch_normalise(x, scale, bias, mask, num_views=2)[0]
        return (y * direction * valid[:, None, None, None]).sum()

    def written_out(x, scale, bias):
        total = 0.0
        for rows in (slice(0, 10), slice(10, 20 if mask is None else 13)):
            view = x[rows]
            var = view.var(axis=(0, 1, 2))
            y = (view - view.mean(axis=(0, 1, 2))) / jnp.sqrt(var + EPSILON) * scale + bias
            total += (y * direction[rows]).sum()
        return total

    with use_platform(platform):
        actual = jax.jit(jax.grad(ours, (0, 1, 2)))(x, SCALE, BIAS)
    for a, e in zip(actual, jax.jit(jax.grad(written_out, (0, 1, 2)))(x, SCALE, BIAS)):
        np.testing.assert_allclose(a, e, atol=2e-5)


@pytest.mark.parametrize("policy", ["static", "running"])
def test_one_valid_value_and_none(policy):
    """A single value has variance 0; a batch of padding changes no statistic."""
    x = jnp.arange(6.0).reshape(2, 1, 1, 3)

    def loss(x, mask):
        y, batch_stats = train(policy, x, mask)
        return (y[0] ** 2).sum(), (y, batch_stats)

    both = jax.jit(jax.grad(loss, has_aux=True))
    for mask, share in ((jnp.array([1.0, 0.0]), 1.0), (jnp.zeros(2), 0.0)):
        gradient, (y, batch_stats) = both(x, mask)
        assert np.isfinite(gradient).all() and np.isfinite(y).all()
        weight = share * (1.0 if policy == "static" else 0.1)
        np.testing.assert_allclose(batch_stats["mean"], (1 - weight) * OLD["mean"] + weight * x[0, 0, 0], rtol=1e-6)
        np.testing.assert_allclose(batch_stats["var"], (1 - weight) * OLD["var"], rtol=1e-6)


@pytest.mark.parametrize("policy", ["static", "running"])
def test_evaluation_uses_what_is_kept_and_training_needs_nothing_kept(policy, x):
    layer = Normalisation(policy)
    y = layer.apply({"params": PARAMS, "batch_stats": OLD}, x)
    np.testing.assert_allclose(y, normalised(x, np.asarray(OLD["mean"]), np.asarray(OLD["var"])), atol=1e-5)
    y = layer.apply({"params": PARAMS}, x, train=True)
    np.testing.assert_allclose(y, normalised(x, *moments(x)[:2]), atol=1e-5)
    initial = layer.init(jax.random.key(0), x, train=True)["batch_stats"]
    np.testing.assert_array_equal(initial["mean"], 0)
    np.testing.assert_array_equal(initial["var"], 1)


# Of bfloat16 it is computed in one pass there: exact to float32's rounding of the mean's square.
@pytest.mark.parametrize(("dtype", "spread", "of_square"), [("float32", 0.01, 0), ("bfloat16", 1.0, 1e-5)])
def test_a_variance_on_a_tpu_beside_a_large_mean(dtype, spread, of_square):
    x = (100 + spread * jax.random.normal(jax.random.key(0), (20, 8, 8, 3))).astype(dtype)
    with use_platform("tpu"):
        y, mean, var, _ = jax.jit(lambda *given: batch_normalise(*given))(x, SCALE, BIAS, MASK)
    valid = slice(13)
    expected = moments(x[valid])
    np.testing.assert_allclose(mean[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(var[0], expected[1], rtol=0.02, atol=of_square * 100**2)
    deviations = np.abs(np.asarray(y[valid], np.float64) - normalised(x, *expected[:2])[valid])
    assert deviations.max() < 0.3 and deviations.mean() < 0.03


def test_group_normalisation_keeps_nothing_and_sees_one_example():
    x = jax.random.normal(jax.random.key(0), (4, 3, 2, 8))
    layer = Normalisation("group")
    variables = layer.init(jax.random.key(0), x)
    assert list(variables) == ["params"]
    values = np.asarray(x).reshape(4, 6, 4, 2)  # 8 channels: four groups of two
    centred = values - values.mean(axis=(1, 3), keepdims=True)
    expected = centred / np.sqrt(values.var(axis=(1, 3), keepdims=True) + EPSILON)
    y = layer.apply(variables, x, train=True, mask=jnp.array([1, 1, 0, 0]), num_views=2)
    np.testing.assert_allclose(y, expected.reshape(x.shape), atol=1e-5)


def test_without_normalisation_there_is_nothing(x):
    layer = Normalisation("none")
    assert layer.init(jax.random.key(0), x, train=True) == {}
    y, state = layer.apply({}, x, True, MASK, 2, mutable=["batch_stats"])
    assert y is x and state == {}


def test_number_of_groups():
    assert [number_of_groups(c) for c in (1, 3, 6, 16, 32, 48, 64, 512)] == [1, 1, 3, 8, 16, 24, 32, 32]
