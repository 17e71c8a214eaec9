"""Bilinear resizing as Pillow computes it, for a whole batch."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

_BITS = 22  # of the fraction of Pillow's fixed-point weights


def resize(images: jax.Array, side: int) -> jax.Array:
    """Resizes images, [B, H, W, C] of any dtype, to side x side pixels, columns first, then rows.

    Only uint8 images are rounded, after each of the two passes.

    Source of the semantics: Pillow's Image.resize with BILINEAR, which antialiases when it shrinks.
    """
    return _resize_axis(_resize_axis(images, side, axis=2), side, axis=1)


def _resize_axis(images: jax.Array, side: int, axis: int) -> jax.Array:
    """Resizes one axis: each new pixel is a weighted mean of the few old pixels around it."""
    length = images.shape[axis]
    if length == side:
        return images
    places, weights = _taps(length, side)
    whole = images.dtype == jnp.uint8
    # Integers give Pillow's exact result; they are at most 2^8 times 2^22.
    weights = np.round(weights * 2**_BITS).astype(np.int32) if whole else weights.astype(np.float32)
    shape = [-1 if a == axis else 1 for a in range(images.ndim)]
    total = sum(
        jnp.take(images, place, axis=axis).astype(weights.dtype) * weight.reshape(shape)
        for place, weight in zip(places, weights)
    )
    return ((total + 2 ** (_BITS - 1)) >> _BITS).astype(jnp.uint8) if whole else total.astype(images.dtype)


@functools.cache
def _taps(length: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """The old pixels of each new pixel, int [T, side], and their weights, float64 [T, side], which sum to 1."""
    scale = length / side
    reach = max(scale, 1.0)  # of the triangle, in old pixels
    centre = (np.arange(side) + 0.5) * scale
    first = np.maximum(np.trunc(centre - reach + 0.5), 0)
    behind = np.minimum(np.trunc(centre + reach + 0.5), length)
    place = first + np.arange(2 * math.ceil(reach) + 1)[:, None]
    weight = np.maximum(1 - np.abs((place - centre + 0.5) / reach), 0) * (place < behind)
    used = weight.any(axis=1)
    return np.minimum(place, length - 1).astype(np.int32)[used], (weight / weight.sum(axis=0))[used]
