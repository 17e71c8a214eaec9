"""Backbones of vectors, such as rows of a table and features of an encoder: a perceptron, and none at all."""

import flax.linen as nn
import jax.numpy as jnp

from fedjax_ssl.models.normalisation import Normalisation


class Mlp(nn.Module):
    """Hidden layers, each linear, normalisation, ReLU: by default two of 128, and 128 features.

    Images and other inputs with several axes are flattened. Layers have a bias where nothing normalises. Kernels start
    LeCun normal.
    """

    depth: int = 2  # hidden layers
    width: int = 128  # of each
    normalisation: str = "static"  # policy of `Normalisation`
    dtype: jnp.dtype = jnp.float32  # dtype of the computation

    @nn.compact
    def __call__(self, inputs, train=False, mask=None, num_views=1):
        """Maps inputs [V*B, ...] to features [V*B, width]; arguments as in `Heads`."""
        x, has_bias = inputs.reshape(len(inputs), -1), self.normalisation == "none"
        for layer in range(self.depth):
            x = nn.Dense(self.width, use_bias=has_bias, dtype=self.dtype, name=f"hidden{layer}")(x)
            x = nn.relu(Normalisation(self.normalisation, name=f"norm{layer}")(x, train, mask, num_views))
        return x


class NoBackbone(nn.Module):
    """The inputs themselves, flattened, are the features: heads are trained on them, as on those of a frozen encoder.

    It has no parameter. With another policy than 'none' its features are normalised, with scale and shift.
    """

    normalisation: str = "none"  # policy of `Normalisation`
    dtype: jnp.dtype = jnp.float32  # dtype of the features

    @nn.compact
    def __call__(self, inputs, train=False, mask=None, num_views=1):
        """Maps inputs [V*B, ...] to features [V*B, F]; arguments as in `Heads`."""
        x = inputs.reshape(len(inputs), -1).astype(self.dtype)
        return Normalisation(self.normalisation, name="norm")(x, train, mask, num_views)
