"""Weak augmentation: a random horizontal flip and a random crop from a padded image."""

import jax
import jax.numpy as jnp

BORDERS = ("reflect", "zeros")  # what an image is padded with


def weak_augment(key: jax.Array, images: jax.Array, flip: bool, padding: int = 4, border: str = "reflect") -> jax.Array:
    """Flips and shifts every image by its own random draw.

    Args:
        key: a JAX random key.
        images: [B, H, W, C], any dtype.
        flip: whether an image is mirrored, left to right, with probability 1/2; digits are not.
        padding: pixels on every side from which the crop is taken; of reflection at most one less than the
          shorter side of the images. Without padding and without a flip the images stay as they are.
        border: what the padding is, 'reflect' or 'zeros' (black).

    Returns:
        [B, H, W, C] in the dtype of the images.

    Source: the standard augmentation of CIFAR as FixMatch (Sohn et al., 2020) and SemiFL use it; with 'zeros' as He et
    al. (2016) and FedLabel do.
    """
    batch, height, width, _ = images.shape
    padding = _usable_padding(padding, height, width, border)
    if padding == 0 and not flip:
        return images  # nothing to draw, and no gather to compile
    flip_key, offset_key = jax.random.split(key)
    offsets = jax.random.randint(offset_key, (batch, 2), 0, 2 * padding + 1)
    flipped = jax.random.bernoulli(flip_key, shape=(batch,)) if flip else jnp.zeros(batch, bool)
    return flip_and_crop(images, flipped, offsets, padding, border)


def flip_and_crop(
    images: jax.Array, flipped: jax.Array, offsets: jax.Array, padding: int, border: str = "reflect"
) -> jax.Array:
    """Mirrors the chosen images, pads all and crops each to its original size.

    Args:
        images: [B, H, W, C], any dtype.
        flipped: bool [B], which images are mirrored, left to right.
        offsets: int32 [B, 2], first row and column of the crop in the padded image, from 0 to 2 * padding;
          (padding, padding) leaves the image where it is.
        padding: pixels on every side; of reflection at most one less than the shorter side of the images.
        border: 'reflect' (the outermost pixels are not repeated) or 'zeros'.

    Returns:
        [B, H, W, C] in the dtype of the images.
    """
    batch, height, width, channels = images.shape
    padding = _usable_padding(padding, height, width, border)
    row = jnp.arange(height) + offsets[:, :1] - padding
    column = jnp.arange(width) + offsets[:, 1:] - padding
    if border == "zeros":
        inside_row, inside_column = (row >= 0) & (row < height), (column >= 0) & (column < width)
        row, column = jnp.clip(row, 0, height - 1), jnp.clip(column, 0, width - 1)
    else:
        row, column = _reflect(row, height), _reflect(column, width)
    column = jnp.where(flipped[:, None], width - 1 - column, column)
    # One gather of whole pixels; no padded copy is made.
    source = (row[:, :, None] * width + column[:, None, :]).reshape(batch, height * width, 1)
    pixels = images.reshape(batch, height * width, channels)
    cropped = jnp.take_along_axis(pixels, source, axis=1, mode="promise_in_bounds").reshape(images.shape)
    if border == "zeros":
        inside = inside_row[:, :, None] & inside_column[:, None, :]
        cropped = jnp.where(inside[..., None], cropped, jnp.zeros((), images.dtype))
    return cropped


def _usable_padding(padding: int, height: int, width: int, border: str) -> int:
    """An image can be reflected by at most one pixel less than its side."""
    return min(padding, height - 1, width - 1) if border == "reflect" else padding


def _reflect(position: jax.Array, length: int) -> jax.Array:
    """Where a position up to length - 1 pixels outside an axis lies after reflection at its ends."""
    return length - 1 - jnp.abs(length - 1 - jnp.abs(position))
