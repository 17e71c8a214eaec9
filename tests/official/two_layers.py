"""The backbone of the comparisons: small, but deep enough that one layer's batch statistics reach the next layer."""

import flax.linen as nn
import jax.numpy as jnp

from fedjax_ssl.models import Normalisation


class TwoLayers(nn.Module):
    """Two dense layers of 12 and 8, each normalised, then ReLU."""

    normalisation: str
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1):
        x = images.reshape(len(images), -1)
        for name, width in (("first", 12), ("second", 8)):
            x = nn.Dense(width, use_bias=False, name=name)(x)
            x = nn.relu(Normalisation(self.normalisation, name=f"{name}_norm")(x, train, mask, num_views))
        return x
