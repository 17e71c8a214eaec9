"""Colour jitter, greying, blur and solarising of a batch, computed as torchvision does on Pillow images.

Images are int32 [B, C, H*W], as in `operations`. Images with one channel have neither saturation nor hue.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.ops.augment.operations import away_from, luma, mean_level

ADJUSTMENTS = ("brightness", "contrast", "saturation", "hue")
SOLARISED_FROM = 128
# If a share of 255 is a whole number n, Pillow may round it down to n - 1, because it computes it in single precision.
_FALLS_SHORT = np.float64(np.float32(np.arange(256) / 255)) * 255 < np.arange(256)


def draw_factors(key: jax.Array, batch: int, strengths: tuple[float, float, float, float]) -> jax.Array:
    """Draws the adjustments of each image: float32 [4, B], in the order of `ADJUSTMENTS`.

    Brightness, contrast and saturation get a factor from max(0, 1 - strength) to 1 + strength. Hue gets a rotation from
    -strength to strength, as a share of the circle.
    """
    least = [max(0.0, 1 - strength) for strength in strengths[:3]] + [-strengths[3]]
    most = [1 + strength for strength in strengths[:3]] + [strengths[3]]
    draws = jax.random.uniform(key, (len(ADJUSTMENTS), batch))
    least, most = (jnp.array(ends, jnp.float32)[:, None] for ends in (least, most))
    return least + (most - least) * draws


def draw_order(key: jax.Array, batch: int) -> jax.Array:
    """Draws the order of each image's adjustments uniformly: int32 [4, B], indices into `ADJUSTMENTS`."""
    return jnp.argsort(jax.random.uniform(key, (len(ADJUSTMENTS), batch)), axis=0)


def jitter(planes: jax.Array, order: jax.Array, factors: jax.Array, with_hue: bool = True) -> jax.Array:
    """Adjusts brightness, contrast, saturation and hue of each image, int32 [B, C, H*W], in its own order.

    For order and factors see `draw_order` and `draw_factors`. Without hue the conversion to HSV and back is skipped,
    which changes levels even if the hue stays.

    Source of the semantics: torchvision's ColorJitter; Pillow's ImageEnhance and its conversions to HSV and back.
    """
    hue = ADJUSTMENTS.index("hue")
    turn_at = jnp.argmax(order == hue, axis=0)
    # Changing the hue costs most, so it is done once, between two passes through the other adjustments. A pass applies
    # the adjustments of the other pass with a factor of 1, which changes nothing.
    others = [jnp.where(place < turn_at, order[place], order[place + 1]) for place in range(len(ADJUSTMENTS) - 1)]
    for place, adjustment in enumerate(others):
        planes = _adjusted(planes, adjustment, jnp.where(place < turn_at, _of(factors, adjustment), 1.0))
    planes = turned_hue(planes, factors[hue]) if with_hue else planes
    for place, adjustment in enumerate(others):
        planes = _adjusted(planes, adjustment, jnp.where(place < turn_at, 1.0, _of(factors, adjustment)))
    return planes


def _of(factors: jax.Array, adjustment: jax.Array) -> jax.Array:
    return jnp.take_along_axis(factors, adjustment[None], axis=0)[0]


def _adjusted(planes: jax.Array, adjustment: jax.Array, factor: jax.Array) -> jax.Array:
    """Adjusts brightness, contrast or saturation of each image by its factor."""
    adjustment, grey = adjustment[:, None, None], luma(planes)
    degenerate = jnp.where(adjustment == ADJUSTMENTS.index("contrast"), mean_level(grey), 0)
    degenerate = jnp.where(adjustment == ADJUSTMENTS.index("saturation"), grey, degenerate)
    return away_from(degenerate, planes, factor)


def turned_hue(planes: jax.Array, turn: jax.Array) -> jax.Array:
    """Rotates the hue of each image by `turn`, float32 [B] in [-0.5, 0.5], a share of the circle."""
    if planes.shape[1] != 3:
        return planes
    hue, saturation, value = to_hsv(planes)
    hue = (hue + jnp.trunc(turn * 255).astype(jnp.int32)[:, None]) & 255
    return from_hsv(hue, saturation, value)


def to_hsv(planes: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pillow's Image.convert("HSV"): int32 [B, 3, H*W] to hue, saturation and value, int32 [B, H*W] from 0 to 255."""
    red, green, blue = planes[:, 0], planes[:, 1], planes[:, 2]
    value = jnp.maximum(red, jnp.maximum(green, blue))
    spread = value - jnp.minimum(red, jnp.minimum(green, blue))
    # Sixths of the circle, times the spread.
    sixths = jnp.where(
        red == value, green - blue, jnp.where(green == value, 2 * spread + blue - red, 4 * spread + red - green)
    )
    sixths = jnp.where(sixths < 0, sixths + 6 * spread, sixths)
    hue = _share_of_255(sixths, 6 * spread)
    return jnp.where(spread > 0, hue, 0), jnp.where(spread > 0, _share_of_255(spread, value), 0), value


def _share_of_255(part: jax.Array, whole: jax.Array) -> jax.Array:
    """255 part / whole, rounded down as Pillow does."""
    # Half a unit in the numerator makes the float division round down like an integer division.
    level = jnp.floor((255 * part + 0.5) / jnp.maximum(whole, 1)).astype(jnp.int32)
    falls_short = jnp.asarray(_FALLS_SHORT)[jnp.clip(level, 0, 255)] & (level * whole == 255 * part)
    return level - falls_short


def from_hsv(hue: jax.Array, saturation: jax.Array, value: jax.Array) -> jax.Array:
    """Converts HSV, int32 [B, H*W] each, to RGB, int32 [B, 3, H*W].

    A channel is value (1 - saturation w). As a function of the hue, w is a trapezium from 0 (the channel is strongest)
    to 1; those of green and blue are shifted by one and two thirds of the circle.
    """
    hue, saturation, value = (plane[:, None] for plane in (hue, saturation, value))
    sixth = 85  # of the circle; hue has 255 steps and counts twice
    along = 2 * hue + sixth * np.array([5, 3, 1])[:, None]
    along = jnp.where(along >= 6 * sixth, along - 6 * sixth, along)
    weight = jnp.clip(jnp.minimum(along, 4 * sixth - along), 0, sixth)
    # The divisor is odd, so no result is half way between two levels.
    share = (value * (255 * sixth - saturation * weight)).astype(jnp.float32) / (255 * sixth)
    return jnp.floor(share + 0.5).astype(jnp.int32)


def to_grey(planes: jax.Array) -> jax.Array:
    """Replaces all channels of each image by its luma."""
    return jnp.broadcast_to(luma(planes), planes.shape)


def blur(planes: jax.Array, sigma: jax.Array, radius: int, size: tuple[int, int]) -> jax.Array:
    """Blurs each image by a Gaussian kernel; borders are reflected without repeating the outermost pixel.

    Args:
        planes, size: int32 [B, C, H*W], grey levels, and (H, W).
        sigma: float32 [B], in pixels.
        radius: the kernel has 2 radius + 1 pixels; at most one less than the shorter side of the images.

    Source of the semantics: torchvision's GaussianBlur, which does not use Pillow's filter.
    """
    offsets = jnp.arange(-radius, radius + 1)
    weights = jnp.exp(-0.5 * jnp.square(offsets / sigma[:, None]))
    weights /= jnp.sum(weights, axis=1, keepdims=True)
    levels = planes.reshape(*planes.shape[:2], *size).astype(jnp.float32)
    for axis, length in zip((2, 3), size):
        padding = [(radius, radius) if a == axis else (0, 0) for a in range(4)]
        padded = jnp.pad(levels, padding, mode="reflect")
        levels = sum(
            weights[:, k, None, None, None] * jax.lax.slice_in_dim(padded, k, k + length, axis=axis)
            for k in range(2 * radius + 1)
        )
    return jnp.clip(jnp.round(levels), 0, 255).astype(jnp.int32).reshape(planes.shape)


def solarise(planes: jax.Array) -> jax.Array:
    """Inverts the upper half of the levels: ImageOps.solarize."""
    return jnp.where(planes < SOLARISED_FROM, planes, 255 - planes)
