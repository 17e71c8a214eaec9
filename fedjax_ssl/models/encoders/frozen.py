"""The frozen encoder that a configuration names, as a function from images to features."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.base.files import expanded
from fedjax_ssl.models.encoders.encoder import encode, find_encoder
from fedjax_ssl.models.encoders.weights import load_weights

ENCODED_TOGETHER = 64  # images in a batch, in training and prediction, so that features are equal to the bit


def frozen(options: Any) -> Callable[[jax.Array], jax.Array]:
    """A function that runs the encoder `config.encoder`: images, uint8 [B, H, W, C], to features, float32 [B, F].

    It is compiled for each new shape of images.

    Raises:
        UserError: there is no such encoder or file, or the weights do not fit.
    """
    encoder = find_encoder(options.name)
    side = options.side or encoder.side
    variables = load_weights(expanded(options.weights), encoder, side)

    @jax.jit
    def features_of(variables: Any, pixels: jax.Array) -> jax.Array:
        return encode(encoder, variables, pixels.astype(jnp.float32) / 255, side)

    return lambda pixels: features_of(variables, pixels)
