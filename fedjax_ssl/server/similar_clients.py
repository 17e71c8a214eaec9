"""Which clients are alike, by what their models say about one fixed image of noise (FedMatch's helpers)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.models.network import Network

MEAN, DEVIATION = 125.0, 125.0  # of the noise, in the unit of pixels, 0 to 255


def noise_image(shape: tuple[int, ...]) -> jax.Array:
    """The same image in every run: normal noise, drawn again beyond two deviations, cut to 0..255; float32 [1, ...]."""
    noise = jax.random.truncated_normal(jax.random.key(0), -2.0, 2.0, (1, *shape))
    return jnp.clip(MEAN + DEVIATION * noise, 0.0, 255.0)


def embed_models(network: Network, model_of: Callable[..., Model], rows, image_shape: tuple[int, ...]) -> jax.Array:
    """The class probabilities that each of R models gives the noise image: float32 [R, C].

    Args:
        network: the architecture.
        model_of: from a row of `rows` to its model.
        rows: a pytree with leaves [R, ...].
        image_shape: (height, width, channels).
    """
    noise = noise_image(image_shape)
    return jax.lax.map(lambda row: network.probabilities(model_of(row), noise)[0], rows)


def nearest_clients(
    vectors: jax.Array, seen: jax.Array, clients: jax.Array, number: int
) -> tuple[jax.Array, jax.Array]:
    """The clients with the nearest vectors by Euclidean distance, apart from oneself; of equal ones the first.

    Args:
        vectors: float32 [K, D].
        seen: bool [K], which clients have a vector.
        clients: int32 [M], who asks.
        number: H, less than K.

    Returns:
        int32 [M, H], the nearest first; and bool [M, H], False where there is none: for one without a vector, or where
        fewer others have been seen.
    """
    distances = jnp.linalg.norm(vectors[clients][:, None] - vectors[None], axis=-1)
    others = seen[None] & (jnp.arange(len(vectors))[None] != clients[:, None]) & seen[clients][:, None]
    least, near = jax.lax.top_k(-jnp.where(others, distances, jnp.inf), number)
    return near, jnp.isfinite(least)
