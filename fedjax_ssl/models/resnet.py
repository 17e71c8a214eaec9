"""ResNet-18 with the stem for small images."""

import flax.linen as nn
import jax.numpy as jnp

from fedjax_ssl.models.layers import Conv, global_average_pool
from fedjax_ssl.models.normalisation import Normalisation


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, each followed by normalisation, and a shortcut; ReLU after the addition.

    Where the shape changes the shortcut is a 1x1 convolution and a normalisation, the identity elsewhere.
    """

    features: int
    strides: int = 1
    normalisation: str = "static"
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x, train, mask, num_views):
        def normalise(y, name):
            return Normalisation(self.normalisation, name=name)(y, train, mask, num_views)

        y = Conv(self.features, strides=self.strides, dtype=self.dtype, name="conv0")(x)
        y = nn.relu(normalise(y, "norm0"))
        y = Conv(self.features, dtype=self.dtype, name="conv1")(y)
        y = normalise(y, "norm1")
        if x.shape != y.shape:
            x = Conv(self.features, (1, 1), self.strides, dtype=self.dtype, name="shortcut_conv")(x)
            x = normalise(x, "shortcut_norm")
        return nn.relu(x + y)


class ResNet18(nn.Module):
    """ResNet-18, post-activation, for images of about 32x32.

    The stem is one 3x3 convolution of stride 1 to 64 channels with normalisation and ReLU, without
    max-pooling; then four stages of two blocks with 64, 128, 256 and 512 channels, the last three starting
    with stride 2; global average pooling to 512 features. With a classifier: 11,173,962 parameters for 10
    classes, 11,220,132 for 100.

    Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016.

    Attributes:
        normalisation: policy of `Normalisation`.
        dtype: dtype of the computation.
    """

    normalisation: str = "static"
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1):
        """Maps images [V*B, H, W, C] to features [V*B, 512]; arguments as in `Heads`."""
        x = Conv(64, dtype=self.dtype, name="stem_conv")(images)
        x = nn.relu(Normalisation(self.normalisation, name="stem_norm")(x, train, mask, num_views))
        for stage, features in enumerate((64, 128, 256, 512)):
            for block in range(2):
                strides = 2 if stage > 0 and block == 0 else 1
                name = f"stage{stage}_block{block}"
                x = BasicBlock(features, strides, self.normalisation, self.dtype, name=name)(x, train, mask, num_views)
        return global_average_pool(x)
