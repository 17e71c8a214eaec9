"""Quarter turns of images."""

import jax
import jax.numpy as jnp


def quarter_turns(images: jax.Array, turns: jax.Array) -> jax.Array:
    """Rotates each image by its own number of quarter turns, counter-clockwise.

    Args:
        images: [B, H, H, C], any dtype.
        turns: int32 [B], 0 to 3.

    Returns:
        The same shape and dtype.
    """
    turned = images
    for number in (1, 2, 3):
        turned = jnp.where((turns == number)[:, None, None, None], jnp.rot90(images, number, axes=(1, 2)), turned)
    return turned
