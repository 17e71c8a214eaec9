"""Mixup: convex combinations of two batches of inputs (Zhang et al., 2018)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

MIX_ORDERS = ("mix_then_augment", "augment_then_mix")


def sample_lambda(key: jax.Array, alpha: float) -> jax.Array:
    """Draws the one mixing weight of a batch, lambda ~ Beta(alpha, alpha), float32 [], with alpha above zero.

    One weight per batch as in SemiFL (Diao et al., 2022); unlike in MixMatch, it is not replaced by max(lambda, 1 -
    lambda).
    """
    return jax.random.beta(key, alpha, alpha, dtype=jnp.float32)


def mix(images_a: jax.Array, images_b: jax.Array, lam: jax.Array) -> jax.Array:
    """lam * images_a + (1 - lam) * images_b for batches [B, H, W, C] of one scale, of any dtype: float32 on it."""
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
    """Mixes two batches, [B, ...] as they are stored, and augments them weakly, with one lambda ~ Beta(alpha, alpha).

    `inputs` are those of the data set, see `fedjax_ssl.data.kinds`, and may have their own `mix` and `mix_order`; order
    is one of `MIX_ORDERS`; `mixing` is the result of `lambda_of` for this key, None: it is computed here. Returns
    float32 [B, ...] on the scale of the inputs, and lambda, float32 [].
    """
    mixed, order = getattr(inputs, "mix", mix), getattr(inputs, "mix_order", order)
    _, weak_key, partner_key = jax.random.split(key, 3)
    mixing = lambda_of(key, alpha) if mixing is None else mixing
    if MIX_ORDERS.index(order) == 0:
        return weak(weak_key, mixed(examples, partners, mixing)), mixing
    return mixed(weak(weak_key, examples), weak(partner_key, partners), mixing), mixing
