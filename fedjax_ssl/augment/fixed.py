"""One fixed view of each image for a whole run, as in codes that write augmented images to disk once."""

from collections.abc import Callable

import jax


def fixed_views(
    augment: Callable[[jax.Array, jax.Array], jax.Array], seed: jax.Array, rows: jax.Array, images: jax.Array
) -> jax.Array:
    """The only view that each image has, drawn by its row of the image table.

    Args:
        augment: (key, images [1, H, W, C]) -> as many views.
        seed: int32 [], of the run.
        rows: int32 [B].
        images: uint8 [B, H, W, C], those of the rows.

    Returns:
        [B, H, W, C].
    """

    def of_row(row, image):
        return augment(jax.random.fold_in(jax.random.key(seed), row), image[None])[0]

    return jax.vmap(of_row)(rows, images)
