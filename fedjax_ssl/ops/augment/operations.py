"""RandAugment's image operations, computed as Pillow does, for a whole batch at once.

Auto-contrast may differ, by one level, if Pillow's double precision falls short of a whole number. In images of
more than 256 pixels a side rotations and shears may take a neighbouring pixel, in 1100 x 64 pixels at 0.1 % of them.

Every image of a batch has its own operation. A `lax.switch` under `vmap` would compute every branch for every
image. Instead, `apply_operation` has four stages, each the identity for images with an operation of another stage:

  resample     rotate, shear x/y, translate x/y: one affine nearest-neighbour gather
  look up      auto-contrast, equalize, invert, posterize, solarize, solarize-add:
               one table of 256 grey levels per image and channel
  blend        brightness, colour, contrast, sharpness: d + factor (x - d) with a
               degenerate image d (black, its grey image, its mean, its smoothed image)
  cut out      a filled square

As in Pillow, images have whole grey levels between two operations, so the arithmetic uses integers wherever
Pillow's does. Images are planes, int32 [B, C, H*W]: XLA then has long inner loops on a CPU, and fills the registers
of a TPU. TPUs are slow at gathers of single elements; products with one-hot matrices take their place.

Source of the semantics: Pillow's ImageOps, ImageEnhance, ImageFilter.SMOOTH, Image.transform and Image.rotate.
"""

import enum

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.base.devices import platform

_LEVELS = 256
_DIGIT = 16  # a level has two digits of this base
_MOST_PIXELS = 128**2  # of an image that is resampled by products, whose memory grows with H * H * W
# Image.transform computes source coordinates in fixed point with 16 fractional bits.
_FRACTION_BITS = 16
_GREY = 128  # background of ROTATE_ON_GREY


class Operation(enum.IntEnum):
    """The operations and the unit of their strength."""

    IDENTITY = 0
    ROTATE = 1  # degrees, counter-clockwise
    SHEAR_X = 2  # columns per row
    SHEAR_Y = 3  # rows per column
    TRANSLATE_X = 4  # pixels, to the left
    TRANSLATE_Y = 5  # pixels, upwards
    AUTO_CONTRAST = 6  # no strength
    EQUALIZE = 7  # no strength
    INVERT = 8  # no strength
    POSTERIZE = 9  # number of bits that remain, 1 to 8, rounded down
    SOLARIZE = 10  # threshold from 0 to 256; levels from it on are inverted
    SOLARIZE_ADD = 11  # levels added before solarizing at 128
    BRIGHTNESS = 12  # factor, 1 is the identity
    COLOR = 13  # factor, 1 is the identity
    CONTRAST = 14  # factor, 1 is the identity
    SHARPNESS = 15  # factor, 1 is the identity
    CUTOUT = 16  # side of the square in pixels
    ROTATE_ON_GREY = 17  # degrees, as ROTATE, with a grey instead of a black background


def to_planes(images: jax.Array) -> jax.Array:
    """Converts a batch of images, uint8 [B, H, W, C], to the layout of this module, int32 [B, C, H*W]."""
    batch, height, width, channels = images.shape
    return jnp.swapaxes(images.reshape(batch, height * width, channels), 1, 2).astype(jnp.int32)


def from_planes(planes: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Undoes `to_planes`: int32 [B, C, H*W], grey levels from 0 to 255, to uint8 [B, H, W, C]."""
    return jnp.swapaxes(planes.astype(jnp.uint8), 1, 2).reshape(len(planes), *size, -1)


def apply_operation(
    planes: jax.Array,
    operation: jax.Array,
    strength: jax.Array,
    centre: jax.Array,
    fill: tuple[int, int, int],
    size: tuple[int, int],
) -> jax.Array:
    """Applies its own operation to each image: int32 [B, C, H*W], grey levels from 0 to 255, C is 1 or 3.

    Each image has an `Operation`, int32 [B], a strength in its unit, float32 [B], and the centre (x, y) of a cutout as
    a share of width and height, float32 [B, 2] in [0, 1). `fill` has the red, green and blue levels of a cutout;
    `size` is (H, W).
    """
    planes = _resample(planes, operation, strength, size)
    grey = luma(planes)
    # Each image uses either its table or its degenerate image, never both.
    table = _level_table(planes, operation, strength)
    looked_up = _look_up(planes, table)
    blended = _blend(planes, grey, operation, strength, size)
    is_blend = (operation >= Operation.BRIGHTNESS) & (operation <= Operation.SHARPNESS)
    planes = jnp.where(is_blend[:, None, None], blended, looked_up)
    return cutout(planes, jnp.where(operation == Operation.CUTOUT, strength, -1.0), centre, fill, size)


def cutout(
    planes: jax.Array, side: jax.Array, centre: jax.Array, fill: tuple[int, int, int], size: tuple[int, int]
) -> jax.Array:
    """Fills one square of each image: int32 [B, C, H*W], grey levels.

    As in public RandAugments, the square is not clipped symmetrically. Away from the borders its side is size + 1
    pixels, because Pillow also draws the last row and column of a rectangle. The side is float32 [B], in pixels;
    negative: nothing is filled. In images with one channel `fill` is its luma. Others as in `apply_operation`.

    Source: Cutout (DeVries and Taylor, 2017) as drawn by FixMatch's and USB's RandAugment.
    """
    inside_x = _covered(centre[:, 0], side, size[1])
    inside_y = _covered(centre[:, 1], side, size[0])
    inside = inside_y[:, :, None] & inside_x[:, None] & (side >= 0)[:, None, None]
    levels = np.asarray(fill, np.int32)
    if planes.shape[1] == 1:
        levels = np.asarray(_luma_of(*fill), np.int32)[None]
    return jnp.where(inside.reshape(len(planes), 1, -1), levels[:, None], planes)


def _covered(centre: jax.Array, side: jax.Array, length: int) -> jax.Array:
    """Which positions along one axis a square covers: bool [B, length]."""
    first = jnp.floor(jnp.maximum(centre * length - side / 2, 0))
    last = jnp.floor(jnp.minimum(first + side, length))
    position = jnp.arange(length)
    return (position >= first[:, None]) & (position <= last[:, None])


def _places(size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The row and the column of each pixel, int [H*W] each."""
    return np.divmod(np.arange(size[0] * size[1]), size[1])


def _resample(planes: jax.Array, operation: jax.Array, strength: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Samples each image at affinely transformed positions, nearest neighbour, black outside (or grey)."""
    batch, channels, pixels = planes.shape
    height, width = size
    matrix = _affine_matrix(operation, strength, height, width)
    # Image.transform rounds the coefficients after moving the start to the first pixel's centre.
    matrix = matrix.at[:, :, 2].add((matrix[:, :, 0] + matrix[:, :, 1]) / 2)
    matrix = jnp.floor(matrix * 2**_FRACTION_BITS + 0.5) / 2**_FRACTION_BITS
    row, column = _places(size)
    positions = np.stack([column, row, np.ones(pixels)]).astype(np.float32)
    # Products and sums are exact in float32 for coordinates below 256. The matrix product also keeps XLA from fusing
    # them into the gather.
    source = jnp.floor(jnp.matmul(matrix, positions, precision=jax.lax.Precision.HIGHEST))
    x, y = source[:, 0].astype(jnp.int32), source[:, 1].astype(jnp.int32)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    behind = jnp.where(operation == Operation.ROTATE_ON_GREY, _GREY, 0)[:, None, None]
    if platform() == "tpu" and pixels <= _MOST_PIXELS:
        return jnp.where(inside[:, None], _values_at(planes.reshape(batch, channels, height, width), y, x), behind)
    # Pixels outside read an additional black or grey pixel after the last one: selecting them after the gather would
    # make rounds on CPUs 1.2 times as long.
    source = jnp.where(inside, y * width + x, pixels)[:, None, :]
    behind = jnp.broadcast_to(behind, (batch, channels, 1)).astype(planes.dtype)
    return jnp.take_along_axis(jnp.concatenate([planes, behind], 2), source, axis=2, mode="promise_in_bounds")


def _affine_matrix(operation: jax.Array, strength: jax.Array, height: int, width: int) -> jax.Array:
    """The coefficients of Image.transform, x' = a x + b y + c and y' = d x + e y + f: [B, 2, 3]."""
    is_rotation = (operation == Operation.ROTATE) | (operation == Operation.ROTATE_ON_GREY)
    angle = jnp.where(is_rotation, jnp.deg2rad(strength), 0)
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    x_row = jnp.where(operation == Operation.SHEAR_X, strength, -sine)
    y_step = jnp.where(operation == Operation.SHEAR_Y, strength, sine)
    centre_x, centre_y = width / 2, height / 2
    # A rotation is about the centre of the image; a shear starts at the upper left corner.
    x_start = centre_x - cosine * centre_x + sine * centre_y
    y_start = centre_y - sine * centre_x - cosine * centre_y
    x_start = jnp.where(operation == Operation.TRANSLATE_X, strength, x_start)
    y_start = jnp.where(operation == Operation.TRANSLATE_Y, strength, y_start)
    return jnp.stack([cosine, x_row, x_start, y_step, cosine, y_start], axis=-1).reshape(-1, 2, 3)


def _level_table(planes: jax.Array, operation: jax.Array, strength: jax.Array) -> jax.Array:
    """The table of new grey levels of each image and channel: int32 [B, C, 256]."""
    batch, channels, pixels = planes.shape
    level = jnp.arange(_LEVELS)
    lowest, highest = jnp.min(planes, axis=2, keepdims=True), jnp.max(planes, axis=2, keepdims=True)

    # Half a unit is added to integer numerators below, so that the float division rounds down like an integer division
    # (which does not vectorise).
    stretched = jnp.floor(((level - lowest) * 255 + 0.5) / jnp.maximum(highest - lowest, 1))
    stretched = jnp.where(highest > lowest, stretched.astype(jnp.int32), level)

    # ImageOps.equalize: the number of pixels below a level, in steps of (pixels - pixels of the highest level) // 255,
    # starting with half a step; the identity if the step is zero.
    at_highest = jnp.sum(planes == highest, axis=2, keepdims=True)
    step = (pixels - at_highest) // 255
    equalized = jnp.floor((step // 2 + _pixels_below(planes) + 0.5) / jnp.maximum(step, 1))
    equalized = jnp.where(step > 0, equalized.astype(jnp.int32), level)

    strength = strength[:, None, None]
    dropped_bits = 8 - jnp.clip(strength.astype(jnp.int32), 1, 8)
    added = jnp.clip(level + strength, 0, 255).astype(jnp.int32)
    choices = {
        Operation.AUTO_CONTRAST: stretched,
        Operation.EQUALIZE: equalized,
        Operation.INVERT: 255 - level,
        Operation.POSTERIZE: (level >> dropped_bits) << dropped_bits,
        Operation.SOLARIZE: jnp.where(level < strength, level, 255 - level),
        Operation.SOLARIZE_ADD: jnp.where(added < 128, added, 255 - added),
    }
    table = jnp.broadcast_to(level, (batch, channels, _LEVELS))
    for choice, new_levels in choices.items():
        table = jnp.where((operation == choice)[:, None, None], new_levels, table)
    return jnp.clip(table, 0, 255)


def _pixels_below(planes: jax.Array) -> jax.Array:
    """Counts, for each of the 256 levels, the pixels of a lower level: [B, C, P] to float32 [B, C, 256]."""
    batch, channels, _ = planes.shape
    if platform() == "tpu":
        upper, lower = (_one_hot(digit, _DIGIT) for digit in (planes >> 4, planes & 15))
        histogram = jnp.einsum("bcip,bcjp->bcij", upper, lower, preferred_element_type=jnp.float32)
    else:
        # One flat scatter: an order of magnitude faster on a CPU than a product of one-hot matrices, a sort or a
        # comparison with every level. Integers make it exact in any order.
        first_bin = _LEVELS * jnp.arange(batch * channels).reshape(batch, channels, 1)
        histogram = jnp.zeros(batch * channels * _LEVELS, jnp.int32)
        histogram = histogram.at[planes + first_bin].add(1, mode="promise_in_bounds").astype(jnp.float32)
    # As a matrix product, because XLA's cumulative sum is slow on a CPU. The counts are exact in float32.
    strictly_lower = np.triu(np.ones((_LEVELS, _LEVELS), np.float32), k=1)
    histogram = histogram.reshape(batch, channels, _LEVELS)
    return jnp.matmul(histogram, strictly_lower, precision=jax.lax.Precision.HIGHEST)


def _look_up(planes: jax.Array, table: jax.Array) -> jax.Array:
    """Replaces every level by its entry in the table: [B, C, P] and [B, C, 256] to [B, C, P]."""
    if platform() == "tpu":
        levels = planes.reshape(-1, planes.shape[2])
        return _values_at(table.reshape(-1, 1, _DIGIT, _DIGIT), levels >> 4, levels & 15).reshape(planes.shape)
    return jnp.take_along_axis(table, planes, axis=2, mode="promise_in_bounds")


def _values_at(planes: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    """The levels of planes [B, C, H, W] at rows and columns [B, P], by products: int32 [B, C, P]; 0 outside."""
    of_rows, of_columns = (_one_hot(places, length) for places, length in zip((row, column), planes.shape[2:]))
    columns = jnp.einsum("bchw,bwp->bchp", planes.astype(jnp.bfloat16), of_columns)
    return jnp.sum(columns * of_rows[:, None], axis=2).astype(jnp.int32)


def _one_hot(places: jax.Array, length: int) -> jax.Array:
    """Which of `length` places: int [..., P] to bfloat16 [..., length, P]; bfloat16 represents all grey levels."""
    return jax.nn.one_hot(places, length, dtype=jnp.bfloat16, axis=-2)


def _blend(
    planes: jax.Array, grey: jax.Array, operation: jax.Array, strength: jax.Array, size: tuple[int, int]
) -> jax.Array:
    """Image.blend of a degenerate image with the image itself, rounded towards zero and clipped."""
    operation = operation[:, None, None]
    degenerate = jnp.where(operation == Operation.CONTRAST, mean_level(grey), 0)
    degenerate = jnp.where(operation == Operation.COLOR, grey, degenerate)
    degenerate = jnp.where(operation == Operation.SHARPNESS, _smooth(planes, size), degenerate)
    return away_from(degenerate, planes, strength)


def away_from(degenerate: jax.Array, planes: jax.Array, factor: jax.Array) -> jax.Array:
    """Image.blend: d + factor (x - d), rounded towards zero and clipped; planes [B, C, H*W], factor [B]."""
    blended = degenerate + factor[:, None, None] * (planes - degenerate)
    return jnp.clip(blended, 0, 255).astype(jnp.int32)


def mean_level(grey: jax.Array) -> jax.Array:
    """int(mean + 0.5) of each image's levels, by integer arithmetic: [B, 1, H*W] to [B, 1, 1]."""
    pixels = grey.shape[2]
    return (2 * jnp.sum(grey, axis=2, keepdims=True) + pixels) // (2 * pixels)


def _smooth(planes: jax.Array, size: tuple[int, int]) -> jax.Array:
    """ImageFilter.SMOOTH: the 3x3 mean in which the centre counts five times; border pixels stay as they are."""
    (height, width), pixels = size, planes.shape[2]
    if min(height, width) < 3:
        return planes
    # The neighbours of the first and the last pixel of a row lie in other rows, but these two stay as they are.
    rows = planes[..., : -2 * width] + planes[..., width:-width] + planes[..., 2 * width :]
    box = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    within = slice(width + 1, pixels - width - 1)  # from the first inner pixel to the last
    # The weights sum to 13; a multiple of 1/13 is never half way between two integers.
    smoothed = jnp.floor((box + 4 * planes[..., within] + 6.5) / 13).astype(jnp.int32)
    column = _places(size)[1][within]
    inner = (column > 0) & (column < width - 1)
    return planes.at[..., within].set(jnp.where(inner, smoothed, planes[..., within]))


def luma(planes: jax.Array) -> jax.Array:
    """Image.convert("L"): [B, C, H*W] to [B, 1, H*W]."""
    if planes.shape[1] == 1:
        return planes
    return _luma_of(planes[:, 0:1], planes[:, 1:2], planes[:, 2:3])


def _luma_of(red, green, blue):
    """ITU-R 601-2 luma in fixed point with 16 fractional bits, rounded, as Pillow computes it."""
    return (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16
