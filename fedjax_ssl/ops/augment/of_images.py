"""The views of an image that a configuration defines: weak, strong, and the two views of self-supervised methods."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fedjax_ssl.ops.augment.randaugment import strong_augment
from fedjax_ssl.ops.augment.views import PAIRS, make_views
from fedjax_ssl.ops.augment.weak import check_resized, weak_augment

Augmentation = Callable[[jax.Array, jax.Array], jax.Array]


class Views(NamedTuple):
    """The augmentations that make views of inputs, each (key, inputs [B, ...]) -> [B, ...]."""

    # weak and strong: for semi-supervised methods.
    weak: Augmentation
    strong: Augmentation
    pair: tuple[Augmentation, Augmentation]  # T and T', for self-supervised methods


def image_views(config: Any, image_shape: tuple[int, int, int], mirrored: bool) -> Views:
    """Makes the views that `config.augment` and `config.views` define for images (height, width, channels).

    `mirrored`: a flip keeps the class of the data set's images. Raises a UserError if a field does not fit them.
    """
    options = config.augment
    flip = mirrored if options.flip == "dataset" else options.flip == "always"
    geometry = {"flip": flip, **{name: options[name] for name in ("padding", "border", "resized")}}
    check_resized(options.resized, options.padding, image_shape)
    colours = {name: options[name] for name in ("flavour", "num_ops", "magnitude")}
    strong = functools.partial(strong_augment, **geometry, **colours)
    return Views(functools.partial(weak_augment, **geometry), strong, make_views(PAIRS[config.views], flip))
