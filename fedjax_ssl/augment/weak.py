"""Weak augmentation: a random horizontal flip and a random crop from a padded or enlarged image."""

import jax
import jax.numpy as jnp

from fedjax_ssl.augment.resize import resize
from fedjax_ssl.errors import UserError
from fedjax_ssl.learning.devices import platform

BORDERS = ("reflect", "zeros")  # what an image is padded with


def weak_augment(
    key: jax.Array, images: jax.Array, flip: bool, padding: int = 4, border: str = "reflect", resized: int = 0
) -> jax.Array:
    """Flips and shifts every image by its own random draw.

    Args:
        key: a JAX random key.
        images: [B, H, W, C], any dtype.
        flip: whether an image is mirrored, left to right, with probability 1/2; digits are not.
        padding: pixels on every side from which the crop is taken; of reflection at most one less than the
          shorter side of the images. Without padding and without a flip the images stay as they are.
        border: what the padding is, 'reflect' or 'zeros' (black).
        resized: above 0 the crop is taken from the image resized to so many pixels a side instead, without padding;
          at least the images' side.

    Returns:
        [B, H, W, C] in the dtype of the images.

    Source: the standard augmentation of CIFAR as FixMatch (Sohn et al., 2020) and SemiFL use it; with 'zeros' as He et
    al. (2016) and FedLabel do; from larger images as RSCFed (Liang et al., 2022) and SemiAnAgg do.
    """
    height, width = images.shape[1:3]
    if resized:
        return crop_at_random(key, resize(images, resized), flip, height, width)
    padding = _usable_padding(padding, height, width, border)
    if padding == 0 and not flip:
        return images  # nothing to draw, and no gather to compile
    flipped, offsets = _draw(key, len(images), flip, 2 * padding, 2 * padding)
    return flip_and_crop(images, flipped, offsets, padding, border)


def crop_at_random(key: jax.Array, images: jax.Array, flip: bool, height: int, width: int) -> jax.Array:
    """Cuts height x width pixels out of every image at a place of its own, and mirrors half of them if `flip`.

    Args:
        key: a JAX random key.
        images: [B, H', W', C], any dtype, not smaller than what is cut out.
        flip: whether an image is mirrored, left to right, with probability 1/2.
        height, width: of the result.

    Returns:
        [B, height, width, C] in the dtype of the images.
    """
    flipped, offsets = _draw(key, len(images), flip, images.shape[1] - height, images.shape[2] - width)
    row, column = offsets[:, :1] + jnp.arange(height), offsets[:, 1:] + jnp.arange(width)
    return _gather(images, row, jnp.where(flipped[:, None], column[:, ::-1], column))


def check_resized(resized: int, padding: int, image_shape: tuple[int, int, int]) -> None:
    """Checks the size that images are brought to before the crop, `augment.resized`.

    Raises:
        UserError: it does not fit the images, or there is padding besides.
    """
    height, width = image_shape[:2]
    if resized and padding:
        raise UserError(f"augment.resized={resized} and augment.padding={padding} exclude each other; set one to 0")
    if resized and height != width:
        raise UserError(f"augment.resized={resized} needs square images, but the data set's are {width} x {height}")
    if resized and resized < height:
        raise UserError(
            f"augment.resized={resized} is less than the images' side of {height} pixels; raise it, or set 0"
        )


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
    height, width = images.shape[1:3]
    padding = _usable_padding(padding, height, width, border)
    row = jnp.arange(height) + offsets[:, :1] - padding
    column = jnp.arange(width) + offsets[:, 1:] - padding
    if border == "zeros":
        inside_row, inside_column = (row >= 0) & (row < height), (column >= 0) & (column < width)
        row, column = jnp.clip(row, 0, height - 1), jnp.clip(column, 0, width - 1)
    else:
        row, column = _reflect(row, height), _reflect(column, width)
    column = jnp.where(flipped[:, None], width - 1 - column, column)
    cropped = _gather(images, row, column)
    if border == "zeros":
        inside = inside_row[:, :, None] & inside_column[:, None, :]
        cropped = jnp.where(inside[..., None], cropped, jnp.zeros((), images.dtype))
    return cropped


def _draw(key: jax.Array, number: int, flip: bool, down: int, right: int) -> tuple[jax.Array, jax.Array]:
    """Which images are mirrored, bool [B], and by how many rows and columns, int32 [B, 2], crops are shifted."""
    flip_key, offset_key = jax.random.split(key)
    offsets = jax.random.randint(offset_key, (number, 2), 0, jnp.array([down + 1, right + 1]))
    return jax.random.bernoulli(flip_key, shape=(number,)) if flip else jnp.zeros(number, bool), offsets


def _gather(images: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    """The pixels at rows [B, h] and columns [B, w] of each image: [B, h, w, C]."""
    batch, height, width, channels = images.shape
    if platform() == "tpu" and images.dtype == jnp.uint8:
        return _gather_by_products(images, row, column)
    shape = (batch, row.shape[1], column.shape[1], channels)
    # One gather of whole pixels; no padded copy is made.
    source = (row[:, :, None] * width + column[:, None, :]).reshape(batch, -1, 1)
    pixels = images.reshape(batch, height * width, channels)
    return jnp.take_along_axis(pixels, source, axis=1, mode="promise_in_bounds").reshape(shape)


def _gather_by_products(images: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    """`_gather` for TPUs, which gather pixel by pixel, and store three channels in the place of 128.

    Products with matrices of a single 1 in each row: exact, as bfloat16 holds all grey levels.
    """
    of_rows, of_columns = (
        jax.nn.one_hot(taken, length, dtype=jnp.bfloat16) for taken, length in zip((row, column), images.shape[1:3])
    )
    planes = images.transpose(0, 3, 1, 2).astype(jnp.bfloat16)
    planes = jnp.einsum("bhr,bcrw->bchw", of_rows, planes)
    planes = jnp.einsum("bwk,bchk->bchw", of_columns, planes)
    return planes.transpose(0, 2, 3, 1).astype(jnp.uint8)


def _usable_padding(padding: int, height: int, width: int, border: str) -> int:
    """An image can be reflected by at most one pixel less than its side."""
    return min(padding, height - 1, width - 1) if border == "reflect" else padding


def _reflect(position: jax.Array, length: int) -> jax.Array:
    """Where a position up to length - 1 pixels outside an axis lies after reflection at its ends."""
    return length - 1 - jnp.abs(length - 1 - jnp.abs(position))
