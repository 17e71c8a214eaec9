"""Images: pixels from 0 to 255, with the views that the section `augment` defines."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data.kinds.kind import Facts, Kind
from fedjax_ssl.ops.augment import image_views


class Images(NamedTuple):
    """Images with values in 0..255, stored as uint8."""

    shape: tuple[int, int, int]  # (height, width, channels)
    # mean and std: of the data set, for each channel, in units of [0, 1] pixel values.
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def to_network(self, inputs: jax.Array) -> jax.Array:
        """Standardises pixels by the data set's mean and deviation."""
        return (inputs.astype(jnp.float32) / 255.0 - jnp.array(self.mean)) / jnp.array(self.std)


def _given(images: Any, facts: Facts) -> np.ndarray:
    """Checks images: uint8 [B, H, W, C], or [B, H, W] for one channel, or other numbers from 0 to 255."""
    images, shape = np.asarray(images), tuple(facts["image_shape"])
    if images.ndim == 3 and shape[-1] == 1:
        images = images[..., np.newaxis]
    if images.shape[1:] != shape or not len(images) or images.dtype.kind not in "fiu":
        wanted = f"numbers [B, H, W, C] of {'x'.join(map(str, shape))}, B at least 1"
        raise UserError(f"images are {images.dtype} {images.shape}; the model takes {wanted}")
    if images.dtype != np.uint8:
        images = images.astype(np.float32)
        least, most = images.min(), images.max()
        if not (least >= 0 and most <= 255) or (most <= 1 and len(np.unique(images)) > 2):
            raise UserError(f"images have values from {least:g} to {most:g}; give pixels from 0 to 255, not normalised")
    return images


KIND = Kind(
    noun="images",
    stored=np.uint8,
    inputs=lambda facts: Images(tuple(facts["image_shape"]), tuple(facts["mean"]), tuple(facts["std"])),
    views=lambda config, facts: image_views(config, tuple(facts["image_shape"]), facts["flip"]),
    given=_given,
)
