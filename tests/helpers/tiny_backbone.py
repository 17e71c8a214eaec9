"""Backbones that compile faster than the small CNN, for tests that are not about convolutions."""

import flax.linen as nn
import jax.numpy as jnp

from fedjax_ssl.models import Normalisation


class TwoLayers(nn.Module):
    """Two hidden layers of 16 with normalisation: `model.name=tests/helpers/tiny_backbone.py:TwoLayers`."""

    normalisation: str

    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1):
        x = images.reshape(len(images), -1)
        for layer in range(2):
            x = nn.Dense(16, use_bias=False, name=f"hidden{layer}")(x)
            x = nn.relu(Normalisation(self.normalisation, name=f"norm{layer}")(x, train, mask, num_views))
        return x


class TinyBackbone(nn.Module):
    """One hidden layer of 32: `model.name=tests/helpers/tiny_backbone.py:TinyBackbone`."""

    normalisation: str
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1):
        x = images.reshape(len(images), -1).astype(self.dtype)
        x = nn.Dense(32, use_bias=False, dtype=self.dtype, name="hidden")(x)
        return nn.relu(Normalisation(self.normalisation, name="norm")(x, train, mask, num_views))
