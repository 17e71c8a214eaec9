"""Random resized crops: a rectangle of each image, resized to the size of the image as Pillow does it."""

import jax
import jax.numpy as jnp

RATIOS = (3 / 4, 4 / 3)  # smallest and largest width / height, whose logarithm is drawn uniformly
TRIES = 10
_CUBIC = -0.5  # Pillow's parameter of the bicubic filter


def draw_boxes(key: jax.Array, batch: int, height: int, width: int, smallest: float) -> jax.Array:
    """Draws a rectangle for each image, with an area that is a uniform share from `smallest` to 1 of the image.

    The result is int32 [B, 4]: top, left, height, width. Of `TRIES` draws the first that fits is used, else `_middle`.
    Source of the semantics: torchvision's RandomResizedCrop.
    """
    area_key, ratio_key, place_key = jax.random.split(key, 3)
    area = height * width * jax.random.uniform(area_key, (TRIES, batch), minval=smallest, maxval=1.0)
    logs = jnp.log(jnp.array(RATIOS))
    ratio = jnp.exp(jax.random.uniform(ratio_key, (TRIES, batch), minval=logs[0], maxval=logs[1]))
    columns = jnp.round(jnp.sqrt(area * ratio)).astype(jnp.int32)
    rows = jnp.round(jnp.sqrt(area / ratio)).astype(jnp.int32)
    fits = (columns > 0) & (columns <= width) & (rows > 0) & (rows <= height)
    first = jnp.argmax(fits, axis=0)[None]
    rows, columns = (jnp.take_along_axis(sides, first, axis=0)[0] for sides in (rows, columns))
    top, left = jnp.floor(
        jax.random.uniform(place_key, (2, batch)) * (jnp.array([[height], [width]]) - jnp.stack([rows, columns]) + 1)
    ).astype(jnp.int32)
    top, left = jnp.minimum(top, height - rows), jnp.minimum(left, width - columns)
    return jnp.where(
        jnp.any(fits, axis=0)[:, None], jnp.stack([top, left, rows, columns], axis=1), _middle(height, width)
    )


def _middle(height: int, width: int) -> jax.Array:
    """The largest centred rectangle with a permitted ratio: int32 [4]."""
    rows, columns = height, width
    if width < RATIOS[0] * height:
        rows = round(width / RATIOS[0])
    elif width > RATIOS[1] * height:
        columns = round(height * RATIOS[1])
    return jnp.array([(height - rows) // 2, (width - columns) // 2, rows, columns], jnp.int32)


def resized_crop(images: jax.Array, boxes: jax.Array, flipped: jax.Array, interpolation: str) -> jax.Array:
    """Cuts a rectangle out of each image, resizes it to the size of the image, and mirrors some images.

    Images are uint8 [B, H, W, C]. Boxes, int32 [B, 4], have top, left, height and width within the image; `flipped`,
    bool [B], says which are mirrored horizontally. The interpolation is 'bilinear' or 'bicubic'.

    Source of the semantics: Pillow's Image.crop and Image.resize: columns first, then rows, with rounding after each.
    """
    height, width = images.shape[1:3]
    of_rows = _weights(boxes[:, 0], boxes[:, 2], height, interpolation)
    of_columns = _weights(boxes[:, 1], boxes[:, 3], width, interpolation)
    of_columns = jnp.where(flipped[:, None, None], of_columns[:, ::-1], of_columns)
    levels = _rounded(jnp.einsum("bow,bhwc->bhoc", of_columns, images.astype(jnp.float32), precision="highest"))
    return _rounded(jnp.einsum("boh,bhwc->bowc", of_rows, levels, precision="highest")).astype(jnp.uint8)


def _rounded(levels: jax.Array) -> jax.Array:
    """Rounds to the nearest integer, halves up, as Pillow does; the margin is for floats just below a half."""
    return jnp.clip(jnp.floor(levels + (0.5 + 2**-12)), 0, 255)


def _weights(first: jax.Array, size: jax.Array, length: int, interpolation: str) -> jax.Array:
    """The weight of each old pixel in each new pixel: float32 [B, length (new), length (old)].

    A crop is never larger than the image, so the filter is never widened for antialiasing.
    """
    place = jnp.arange(length) - first[:, None]  # position in the crop
    # The distance between the centres of an old and a new pixel, in integer units so that nothing is rounded here.
    apart = (2 * place[:, None, :] + 1) * length - (2 * jnp.arange(length)[:, None] + 1) * size[:, None, None]
    distance = jnp.abs(apart) / (2 * length)
    inside = (place >= 0) & (place < size[:, None])
    weights = jnp.where(inside[:, None, :], _filter(distance, interpolation), 0.0)
    return weights / jnp.sum(weights, axis=2, keepdims=True)


def _filter(distance: jax.Array, interpolation: str) -> jax.Array:
    """Pillow's filters as functions of the distance in old pixels."""
    if interpolation == "bilinear":
        return jnp.maximum(1 - distance, 0)
    near = ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance**2 + 1
    far = (((distance - 5) * distance + 8) * distance - 4) * _CUBIC
    return jnp.where(distance < 1, near, jnp.where(distance < 2, far, 0.0))
