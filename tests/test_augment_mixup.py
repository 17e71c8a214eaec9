"""Mixup: the distribution of the weight and the mixture."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_ssl.augment import mix, sample_lambda


@pytest.mark.parametrize("alpha", [0.75, 2.0])
def test_lambda_is_beta_distributed(alpha):
    keys = jax.random.split(jax.random.key(0), 4000)
    weights = np.asarray(jax.vmap(lambda key: sample_lambda(key, alpha))(keys))
    assert weights.shape == (4000,) and weights.dtype == np.float32
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(weights.mean() - 0.5) < 5 * np.sqrt(variance / 4000)
    assert abs(weights.var() - variance) < 0.05 * variance
    # Not folded to the larger half.
    assert stats.kstest(weights, stats.beta(alpha, alpha).cdf).pvalue > 1e-3


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_the_mixture_is_float32_and_weighs_the_first_batch_with_lambda(dtype):
    rng = np.random.default_rng(0)
    first, second = (rng.integers(0, 256, (2, 4, 4, 3)).astype(dtype) for _ in range(2))
    mixed = mix(jnp.asarray(first), jnp.asarray(second), jnp.float32(0.8))
    assert mixed.dtype == jnp.float32
    np.testing.assert_allclose(mixed, 0.8 * first.astype(float) + 0.2 * second.astype(float), rtol=1e-5)
