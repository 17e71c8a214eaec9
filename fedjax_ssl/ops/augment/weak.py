"""Weak augmentation: a random horizontal flip and a random crop from a padded or enlarged image."""

import jax
import jax.numpy as jnp

from fedjax_ssl.base.devices import platform
from fedjax_ssl.base.errors import UserError
from fedjax_ssl.ops.augment.resize import resize


def weak_augment(
    key: jax.Array, images: jax.Array, flip: bool, padding: int = 4, border: str = "reflect", resized: int = 0
) -> jax.Array:
    """Flips and shifts every image, [B, H, W, C] of any dtype, by its own random draw.

    With `flip` images are mirrored horizontally with probability 1/2; not meant for digits. `padding` is the number of
    pixels that are added on every side before cropping, with the border 'reflect' (at most one less than the shorter
    side) or 'zeros' (black). With `resized` images are resized to this side before cropping, instead of being padded.

    Source: the standard augmentation of CIFAR as in FixMatch (Sohn et al., 2020) and SemiFL; 'zeros' as in He et al.
    (2016) and FedLabel; crops of larger images as in RSCFed (Liang et al., 2022) and SemiAnAgg.
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
    """Cuts height x width pixels out of every image at its own random position, and may mirror it with probability 1/2.

    Images are [B, H', W', C] of any dtype, at least as large as the crop.
    """
    flipped, offsets = _draw(key, len(images), flip, images.shape[1] - height, images.shape[2] - width)
    row, column = offsets[:, :1] + jnp.arange(height), offsets[:, 1:] + jnp.arange(width)
    return _gather(images, row, jnp.where(flipped[:, None], column[:, ::-1], column))


def check_resized(resized: int, padding: int, image_shape: tuple[int, int, int]) -> None:
    """Raises a UserError if `augment.resized` does not fit the images, or `padding` is set as well."""
    height, width = image_shape[:2]
    if resized and (padding or height != width or resized < height):
        raise UserError(
            f"augment.resized={resized} needs augment.padding=0, which is {padding}, and square images of at most this "
            f"side, which are {width} x {height}"
        )


def flip_and_crop(
    images: jax.Array, flipped: jax.Array, offsets: jax.Array, padding: int, border: str = "reflect"
) -> jax.Array:
    """Mirrors the chosen images, bool [B], pads all, [B, H, W, C] of any dtype, and crops each to its original size.

    Offsets are the first row and column of the crop in the padded image, int32 [B, 2] from 0 to 2 * padding; padding
    and border as in `weak_augment`; 'reflect' does not repeat the outermost pixels.
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
    """Draws which images are mirrored, bool [B], and the rows and columns by which crops are shifted, int32 [B, 2]."""
    flip_key, offset_key = jax.random.split(key)
    offsets = jax.random.randint(offset_key, (number, 2), 0, jnp.array([down + 1, right + 1]))
    return jax.random.bernoulli(flip_key, shape=(number,)) if flip else jnp.zeros(number, bool), offsets


def _gather(images: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    """The pixels at rows [B, h] and columns [B, w] of each image: [B, h, w, C]."""
    batch, height, width, channels = images.shape
    if platform() == "tpu" and images.dtype == jnp.uint8:
        return _gather_by_products(images, row, column)
    shape = (batch, row.shape[1], column.shape[1], channels)
    # One gather of whole pixels, without a padded copy.
    source = (row[:, :, None] * width + column[:, None, :]).reshape(batch, -1, 1)
    pixels = images.reshape(batch, height * width, channels)
    return jnp.take_along_axis(pixels, source, axis=1, mode="promise_in_bounds").reshape(shape)


def _gather_by_products(images: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    """`_gather` for TPUs, which would gather pixel by pixel and store three channels in the space of 128.

    It multiplies with one-hot matrices. This is exact, because bfloat16 represents all grey levels.
    """
    of_rows, of_columns = (
        jax.nn.one_hot(taken, length, dtype=jnp.bfloat16) for taken, length in zip((row, column), images.shape[1:3])
    )
    planes = images.transpose(0, 3, 1, 2).astype(jnp.bfloat16)
    planes = jnp.einsum("bhr,bcrw->bchw", of_rows, planes)
    planes = jnp.einsum("bwk,bchk->bchw", of_columns, planes)
    return planes.transpose(0, 2, 3, 1).astype(jnp.uint8)


def _usable_padding(padding: int, height: int, width: int, border: str) -> int:
    """Limits reflection to one pixel less than the shorter side of the images."""
    return min(padding, height - 1, width - 1) if border == "reflect" else padding


def _reflect(position: jax.Array, length: int) -> jax.Array:
    """Reflects positions that lie up to length - 1 pixels outside an axis at its ends."""
    return length - 1 - jnp.abs(length - 1 - jnp.abs(position))
