"""A backbone with convolutions and a shortcut in flax, for methods that treat convolutions specially, and its
reference.
"""

import autograd.numpy as np
import flax.linen as nn
import jax.numpy as jnp

from fedjax_ssl.models import Normalisation
from fedjax_ssl.models.layers import Conv
from tests.official.harness import SIDE
from tests.official.reference import normalise, pixels

NAME = f"{__file__}:Convolutions"


class Convolutions(nn.Module):
    """A 3x3 convolution of 4 channels, and one of 6 with a 1x1 shortcut; all normalised; ReLU; 96 features.

    Layer names are those of `TwoLayers`, and `shortcut`.
    """

    normalisation: str
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1):
        def layer(name, x, width, size):
            x = Conv(width, (size, size), name=name)(x)
            return Normalisation(self.normalisation, name=f"{name}_norm")(x, train, mask, num_views)

        x = nn.relu(layer("first", images, 4, 3))
        return nn.relu(layer("second", x, 6, 3) + layer("shortcut", x, 6, 1)).reshape(len(x), -1)


def convolution(kernel, x):
    """Convolves x [B, H, W, C], padded with zeros, with a kernel [h, w, C, D], as a sum over kernel positions."""
    reach = len(kernel) // 2
    padded = np.pad(x, ((0, 0), (reach, reach), (reach, reach), (0, 0)), "constant")
    places = [(i, j) for i in range(len(kernel)) for j in range(len(kernel))]
    return sum(padded[:, i : i + SIDE, j : j + SIDE] @ kernel[i, j] for i, j in places)


def backbone(params, statistics, images, train):
    """The reference of `Convolutions`: images [B, H, W, 1] -> features [B, 96], new statistics."""
    new = {}

    def layer(name, x):
        x = convolution(params[name]["kernel"], x)
        place = f"{name}_norm"
        y, new[place] = normalise(params[place], statistics[place], x.reshape(-1, x.shape[-1]), train)
        return y.reshape(x.shape)

    x = np.maximum(layer("first", pixels(images).reshape(images.shape)), 0)
    x = np.maximum(layer("second", x) + layer("shortcut", x), 0)
    return x.reshape(len(x), -1), new
