"""A model's mean confidence on a set of images: the mean of its largest probability."""

import jax
import jax.numpy as jnp

from fedjax_ssl.models.network import Network
from fedjax_ssl.ops.batches import map_batches
from fedjax_ssl.ops.sgd import Model


def mean_confidence(
    network: Network, model: Model, images: jax.Array, counted: jax.Array, batch_size: int | None
) -> jax.Array:
    """The mean of max_c p(c | x) over the selected images: float32 []; 0 without any.

    Args:
        network: the architecture.
        model: the model, used in evaluation mode.
        images: uint8 [N, H, W, C].
        counted: bool [N], the selected images.
        batch_size: images at a time, see `map_batches`.
    """
    largest = map_batches(
        lambda rows: jnp.max(network.probabilities(model, images[rows]), axis=-1),
        jnp.arange(len(images)),
        batch_size,
    )
    return jnp.sum(jnp.where(counted, largest, 0.0)) / jnp.maximum(jnp.sum(counted), 1)
