"""A backbone that compiles in less time than the small CNN, for tests that are not about convolutions."""

import flax.linen as nn
import jax.numpy as jnp

from fedjax_ssl.models import Normalisation


class TinyBackbone(nn.Module):
    """One hidden layer of 32: `model.name=tests/tiny_backbone.py:TinyBackbone`."""

    normalisation: str
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1):
        x = images.reshape(len(images), -1).astype(self.dtype)
        x = nn.Dense(32, use_bias=False, dtype=self.dtype, name="hidden")(x)
        return nn.relu(Normalisation(self.normalisation, name="norm")(x, train, mask, num_views))
