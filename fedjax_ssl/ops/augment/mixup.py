"""Mixup: convex combinations of two batches of inputs (Zhang et al., 2018)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

MIX_ORDERS = ("mix_then_augment", "augment_then_mix")


def sample_lambda(key: jax.Array, alpha: float) -> jax.Array:
    """Draws the one mixing weight of a batch.

    Unlike in MixMatch, the weight is not replaced by max(lambda, 1 - lambda).

    Args:
        key: a JAX random key.
        alpha: both parameters of the Beta distribution, above zero.

    Returns:
        float32 [], lambda ~ Beta(alpha, alpha).

    Source: mixup (Zhang et al., 2018); one weight per batch as in SemiFL (Diao et al., 2022).
    """
    return jax.random.beta(key, alpha, alpha, dtype=jnp.float32)


def mix(images_a: jax.Array, images_b: jax.Array, lam: jax.Array) -> jax.Array:
    """Mixes two batches of images, lam * images_a + (1 - lam) * images_b.

    Args:
        images_a: [B, H, W, C], any numeric dtype and scale.
        images_b: [B, H, W, C], on the scale of images_a.
        lam: float32 [], the weight of images_a.

    Returns:
        float32 [B, H, W, C], on the scale of the images.
    """
    images_a, images_b = images_a.astype(jnp.float32), images_b.astype(jnp.float32)
    return lam * images_a + (1.0 - lam) * images_b


def lambda_of(key: jax.Array, alpha: float) -> jax.Array:
    """The lambda that `mix_inputs` draws with this key, float32 []."""
    return sample_lambda(jax.random.split(key, 3)[0], alpha)


def mix_inputs(
    inputs: Any,
    weak: Callable[[jax.Array, jax.Array], jax.Array],
    key: jax.Array,
    examples: jax.Array,
    partners: jax.Array,
    alpha: float,
    order: str,
    mixing: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Mixes two batches and augments them weakly, with one lambda ~ Beta(alpha, alpha) for the batch.

    Args:
        inputs: the `Inputs` of the data set, see `fedjax_ssl.data.kinds`; may have its own `mix` and `mix_order`.
        weak: the weak augmentation, (key, inputs) -> inputs.
        key: a JAX random key.
        examples, partners: [B, ...], as they are stored.
        alpha: both parameters of the Beta distribution.
        order: one of `MIX_ORDERS`.
        mixing: the result of `lambda_of` for this key; None: it is computed here.

    Returns:
        float32 [B, ...] on the scale of the inputs, and lambda, float32 [].
    """
    mixed, order = getattr(inputs, "mix", mix), getattr(inputs, "mix_order", order)
    _, weak_key, partner_key = jax.random.split(key, 3)
    mixing = lambda_of(key, alpha) if mixing is None else mixing
    if order == "mix_then_augment":
        return weak(weak_key, mixed(examples, partners, mixing)), mixing
    return mixed(weak(weak_key, examples), weak(partner_key, partners), mixing), mixing
