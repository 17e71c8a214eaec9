"""ResNet-9, FedMatch's short residual network with max-pooling."""

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_ssl.models.layers import Conv, check_sides, max_pool2d
from fedjax_ssl.models.normalisation import Normalisation


class ResNet9(nn.Module):
    """Eight 3x3 convolutions without bias, each followed by normalisation and ReLU.

    In order: a convolution to `width` channels; one to 2 `width`, then 2x2 max-pooling; a residual block of two
    convolutions; one to 4 `width`, then pooling; one to 8 `width`, then pooling; a residual block of two convolutions;
    the maximum of each channel over all positions (FedMatch's 4x4 max-pooling at 32x32 pixels). The features are
    8 `width` numbers. FedMatch's network has no normalisation (the policy 'none') and a classifier without bias:
    6,568,640 parameters for 10 classes. Initial kernels are LeCun normal (variance 1 / fan-in, truncated), as in
    FedMatch.

    Images must be 8x8 or larger.

    Source: Jeong et al., FedMatch, ICLR 2021, and its public code. Raises UserError if images are smaller.
    """

    width: int = 64  # channels of the first convolution
    normalisation: str = "static"  # policy of `Normalisation`
    dtype: DTypeLike = jnp.float32  # dtype of the computation

    classifier_bias = False  # whether the linear classifier on top has a bias, see `Heads`

    @property
    def narrow_channels(self):
        """Channels of the first stage, see `packing`."""
        return self.width

    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1):
        """Maps images [V*B, H, W, C] to features [V*B, 8 width]; arguments as in `Heads`."""

        def layer(x, features, number):
            x = Conv(features, dtype=self.dtype, init=nn.initializers.lecun_normal(), name=f"conv{number}")(x)
            return nn.relu(Normalisation(self.normalisation, name=f"norm{number}")(x, train, mask, num_views))

        check_sides("resnet9", images, 8)
        x = layer(images, self.width, 0)
        x = max_pool2d(layer(x, 2 * self.width, 1))
        x = x + layer(layer(x, 2 * self.width, 2), 2 * self.width, 3)
        x = max_pool2d(layer(x, 4 * self.width, 4))
        x = max_pool2d(layer(x, 8 * self.width, 5))
        x = x + layer(layer(x, 8 * self.width, 6), 8 * self.width, 7)
        return x.max(axis=(1, 2))
