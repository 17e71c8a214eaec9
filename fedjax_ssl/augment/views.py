"""The two views of self-supervised methods: crop, flip, colour jitter, grey, blur, solarising, in this order."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.augment import colour
from fedjax_ssl.augment.operations import from_planes, to_planes
from fedjax_ssl.augment.resized_crop import draw_boxes, resized_crop

SIGMAS = (0.1, 2.0)  # range of the blur's sigma in pixels, drawn uniformly
View = Callable[[jax.Array, jax.Array], jax.Array]  # (key, images) -> images


def make_views(options: Any, flip: bool) -> tuple[View, View]:
    """The augmentations T and T', which differ in how often they blur and solarise.

    Args:
        options: the section `config.views`.
        flip: whether images are mirrored horizontally with probability 1/2.

    Returns:
        Two functions from a key and images uint8 [B, H, W, C] to images of the same shape and dtype.
    """
    view = functools.partial(random_view, options=options, flip=flip)
    return (
        functools.partial(view, blurred=options.blur, solarised=0.0),
        functools.partial(view, blurred=options.second_blur, solarised=options.second_solarise),
    )


def random_view(
    key: jax.Array, images: jax.Array, options: Any, flip: bool, blurred: float, solarised: float
) -> jax.Array:
    """Makes one random view of each image.

    Args:
        key: a JAX random key.
        images: uint8 [B, H, W, C].
        options: the section `config.views`.
        flip: see `make_views`.
        blurred, solarised: probabilities of blurring and of solarising.

    Returns:
        uint8 [B, H, W, C].

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

    strengths = (options.brightness, options.contrast, options.saturation, options.hue)
    factors, order = colour.draw_factors(jitter_key, batch, strengths), colour.draw_order(order_key, batch)
    planes = sometimes(0, options.jitter, lambda planes: colour.jitter(planes, order, factors, options.hue > 0), planes)
    if channels == 3:
        planes = sometimes(1, options.grey, colour.to_grey, planes)
    radius = min(options.blur_radius, height - 1, width - 1)
    sigmas = jax.random.uniform(sigma_key, (batch,), minval=SIGMAS[0], maxval=SIGMAS[1])
    planes = sometimes(2, blurred, lambda planes: colour.blur(planes, sigmas, radius, (height, width)), planes)
    return from_planes(sometimes(3, solarised, colour.solarise, planes), (height, width))
