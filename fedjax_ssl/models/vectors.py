"""Backbones for vectors, such as rows of a table or features of an encoder: a perceptron, or no backbone at all."""

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_ssl.models.normalisation import Normalisation


class Mlp(nn.Module):
    """A multi-layer perceptron: hidden layers of linear map, normalisation and ReLU; by default two layers of 128.

    Images and other inputs with several axes are flattened. Layers have a bias only under the policy 'none'. Initial
    kernels are LeCun normal.
    """

    depth: int = 2  # number of hidden layers
    width: int = 128  # of each hidden layer
    normalisation: str = "static"  # policy of `Normalisation`
    dtype: DTypeLike = jnp.float32  # dtype of the computation

    @nn.compact
    def __call__(self, inputs, train=False, mask=None, num_views=1):
        """Maps inputs [V*B, ...] to features [V*B, width]; arguments as in `Heads`."""
        x, has_bias = inputs.reshape(len(inputs), -1), self.normalisation == "none"
        for layer in range(self.depth):
            x = nn.Dense(self.width, use_bias=has_bias, dtype=self.dtype, name=f"hidden{layer}")(x)
            x = nn.relu(Normalisation(self.normalisation, name=f"norm{layer}")(x, train, mask, num_views))
        return x


class NoBackbone(nn.Module):
    """Returns the flattened inputs as features, for example to train heads on the features of a frozen encoder.

    It has no parameters under the policy 'none'. Other policies normalise the features, with scale and shift.
    """

    normalisation: str = "none"  # policy of `Normalisation`
    dtype: DTypeLike = jnp.float32  # dtype of the features

    @nn.compact
    def __call__(self, inputs, train=False, mask=None, num_views=1):
        """Maps inputs [V*B, ...] to features [V*B, F]; arguments as in `Heads`."""
        x = inputs.reshape(len(inputs), -1).astype(self.dtype)
        return Normalisation(self.normalisation, name="norm")(x, train, mask, num_views)
