"""Mixup: the distribution of the weight, the mixture, and which of its images are augmented."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_ssl.ops.augment import sample_lambda, weak_augment
from fedjax_ssl.ops.augment.mixup import mix_inputs


def test_lambda_is_beta_distributed(alpha=0.75):
    keys = jax.random.split(jax.random.key(0), 4000)
    weights = np.asarray(jax.jit(jax.vmap(lambda key: sample_lambda(key, alpha)))(keys))
    assert weights.shape == (4000,) and weights.dtype == np.float32
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(weights.mean() - 0.5) < 5 * np.sqrt(variance / 4000)
    assert abs(weights.var() - variance) < 0.05 * variance
    # Not folded to the larger half.
    assert stats.kstest(weights, stats.beta(alpha, alpha).cdf).pvalue > 1e-3


@pytest.mark.parametrize("mix_order", ["mix_then_augment", "augment_then_mix"])
def test_crops_are_drawn_for_the_mixture_or_for_each_of_its_images(mix_order, monkeypatch):
    """Each mixture is looked up among those of all pairs of crops: (top, left) of the image and of its partner."""
    monkeypatch.setattr("fedjax_ssl.ops.augment.mixup.sample_lambda", lambda key, alpha: jnp.float32(0.3))
    weak = functools.partial(weak_augment, flip=False, padding=1)
    images, partners = np.random.default_rng(0).integers(0, 256, (2, 20, 8, 8, 1)).astype(np.uint8)
    mix_jitted = jax.jit(lambda *pair: mix_inputs(None, weak, jax.random.key(0), *pair, 0.75, mix_order))
    mixtures, mixing = mix_jitted(images, partners)
    assert mixing == jnp.float32(0.3)

    def crops(image):
        padded = np.pad(image[..., 0].astype(np.float64), 1, mode="reflect")
        return {(top, left): padded[top : top + 8, left : left + 8] for top in range(3) for left in range(3)}

    drawn = []
    for mixture, image, partner in zip(np.asarray(mixtures), images, partners):
        candidates = [
            (a, b)
            for a, of_image in crops(image).items()
            for b, of_partner in crops(partner).items()
            if np.allclose(mixture[..., 0], 0.3 * of_image + 0.7 * of_partner, atol=1e-3)
        ]
        assert len(candidates) == 1
        drawn += candidates
    assert len({a for a, _ in drawn}) > 4  # each image has its own
    together = sum(a == b for a, b in drawn)
    # Of 20 pairs that are drawn apart 2.2 are the same by chance.
    assert together == 20 if mix_order == "mix_then_augment" else together < 10
