"""The two views of self-supervised methods: crop, flip, colour jitter, grey, blur, solarising, in this order."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.ops.augment import colour
from fedjax_ssl.ops.augment.operations import from_planes, to_planes
from fedjax_ssl.ops.augment.resized_crop import draw_boxes, resized_crop

SIGMAS = (0.1, 2.0)  # range of the blur's sigma in pixels, drawn uniformly
BLUR_RADIUS = 1  # in pixels: a Gaussian kernel of 3 x 3 pixels
View = Callable[[jax.Array, jax.Array], jax.Array]  # (key, images) -> images


class Pair(NamedTuple):
    """How two views of an image differ from it; made in this order, as torchvision does with Pillow."""

    smallest_crop: float  # least area of a crop, a share of the image; it is resized
    interpolation: str  # of the crop: 'bilinear' or 'bicubic'
    # b of brightness, contrast and saturation: the factor is drawn between max(0, 1 - b) and 1 + b. The last is the
    # largest rotation of hue, as a share of the colour circle.
    strengths: tuple[float, float, float, float]
    jitter: float = 0.8  # probability of colour jitter, in random order
    grey: float = 0.2  # probability of conversion to grey
    blur: tuple[float, float] = (0.0, 0.0)  # probabilities of blurring the first and the second view
    solarise: float = 0.0  # probability of inverting the lighter half of the levels, second view


# By the names of `config.views`: those of FedU's and FedEMA's code, and those of Orchestra's.
PAIRS = {
    "simclr": Pair(0.08, "bilinear", (0.8, 0.8, 0.8, 0.2)),
    "orchestra": Pair(0.5, "bicubic", (0.4, 0.4, 0.2, 0.1), blur=(0.5, 0.1), solarise=0.2),
}


def make_views(options: Pair, flip: bool) -> tuple[View, View]:
    """The augmentations T and T', which differ in how often they blur and solarise, see `random_view`."""
    view = functools.partial(random_view, options=options, flip=flip)
    return (
        functools.partial(view, blurred=options.blur[0], solarised=0.0),
        functools.partial(view, blurred=options.blur[1], solarised=options.solarise),
    )


def random_view(
    key: jax.Array, images: jax.Array, options: Pair, flip: bool, blurred: float, solarised: float
) -> jax.Array:
    """Makes one random view of each image, uint8 [B, H, W, C], by one of `PAIRS`; the last two are probabilities.

    Source: SimCLR (Chen et al., 2020) and BYOL (Grill et al., 2020), which adds solarising.
    """
    batch, height, width, channels = images.shape
    box_key, flip_key, jitter_key, order_key, sigma_key, coin_key = jax.random.split(key, 6)
    boxes = draw_boxes(box_key, batch, height, width, options.smallest_crop)
    flipped = jax.random.bernoulli(flip_key, shape=(batch,)) & flip
    planes = to_planes(resized_crop(images, boxes, flipped, options.interpolation))

    coins = jax.random.uniform(coin_key, (4, batch))

    def sometimes(
        number: int, probability: float, changed: Callable[[jax.Array], jax.Array], planes: jax.Array
    ) -> jax.Array:
        """Changes each image with a probability; computes nothing if that is 0."""
        if probability == 0:
            return planes
        return jnp.where((coins[number] < probability)[:, None, None], changed(planes), planes)

    factors, order = colour.draw_factors(jitter_key, batch, options.strengths), colour.draw_order(order_key, batch)
    turns = options.strengths[3] > 0
    planes = sometimes(0, options.jitter, lambda planes: colour.jitter(planes, order, factors, turns), planes)
    if channels == 3:
        planes = sometimes(1, options.grey, colour.to_grey, planes)
    radius = min(BLUR_RADIUS, height - 1, width - 1)
    sigmas = jax.random.uniform(sigma_key, (batch,), minval=SIGMAS[0], maxval=SIGMAS[1])
    planes = sometimes(2, blurred, lambda planes: colour.blur(planes, sigmas, radius, (height, width)), planes)
    return from_planes(sometimes(3, solarised, colour.solarise, planes), (height, width))


def quarter_turns(images: jax.Array, turns: jax.Array) -> jax.Array:
    """Rotates images [B, H, H, C] of any dtype by their own numbers, int32 [B], of quarter turns, counter-clockwise."""
    turned = images
    for number in (1, 2, 3):
        turned = jnp.where((turns == number)[:, None, None, None], jnp.rot90(images, number, axes=(1, 2)), turned)
    return turned
