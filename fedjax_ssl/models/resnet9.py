"""ResNet-9, a short residual network with max-pooling, as FedMatch has it."""

import flax.linen as nn
import jax.numpy as jnp

from fedjax_ssl.models.layers import Conv, max_pool2d
from fedjax_ssl.models.normalisation import Normalisation


class ResNet9(nn.Module):
    """Eight 3x3 convolutions without bias, each followed by normalisation and ReLU, in this order:

    to `width` channels; to twice as many, 2x2 max-pooling; two of them, added to their input; to four times, pooling;
    to eight times, pooling; two of them, added to their input; the largest value of each channel over all positions
    (at 32x32 pixels FedMatch's 4x4 max-pooling): 8 `width` features. FedMatch's network has no normalisation
    (the policy 'none') and a classifier without bias: 6,568,640 parameters for 10 classes. Kernels start LeCun normal
    (variance 1 / fan-in, truncated), as there.

    Any image of 8x8 or more.

    Source: Jeong et al., FedMatch, ICLR 2021, and its public code.
    """

    width: int = 64  # channels of the first convolution
    normalisation: str = "static"  # policy of `Normalisation`
    dtype: jnp.dtype = jnp.float32  # dtype of the computation

    classifier_bias = False  # of the linear classifier on top, see `Heads`

    @property
    def narrow_channels(self):
        """Of the first stage, see `packing`."""
        return self.width

    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1):
        """Maps images [V*B, H, W, C] to features [V*B, 8 width]; arguments as in `Heads`."""

        def layer(x, features, number):
            x = Conv(features, dtype=self.dtype, init=nn.initializers.lecun_normal(), name=f"conv{number}")(x)
            return nn.relu(Normalisation(self.normalisation, name=f"norm{number}")(x, train, mask, num_views))

        x = layer(images, self.width, 0)
        x = max_pool2d(layer(x, 2 * self.width, 1))
        x = x + layer(layer(x, 2 * self.width, 2), 2 * self.width, 3)
        x = max_pool2d(layer(x, 4 * self.width, 4))
        x = max_pool2d(layer(x, 8 * self.width, 5))
        x = x + layer(layer(x, 8 * self.width, 6), 8 * self.width, 7)
        return x.max(axis=(1, 2))
