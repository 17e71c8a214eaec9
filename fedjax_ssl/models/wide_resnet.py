"""Wide residual networks for small images."""

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_ssl.models import packing
from fedjax_ssl.models.layers import Conv, global_average_pool
from fedjax_ssl.models.normalisation import Normalisation


class PreActivationBlock(nn.Module):
    """Normalisation, ReLU, 3x3 convolution, twice, added to the shortcut.

    The shortcut is the block's input, or, if the widths differ, a 1x1 convolution of the first normalised and rectified
    activations.
    """

    features: int
    strides: int = 1
    normalisation: str = "static"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x, train, mask, num_views):
        def normalise(y, name):
            return Normalisation(self.normalisation, name=name)(y, train, mask, num_views)

        y = nn.relu(normalise(x, "norm0"))
        if x.shape[-1] != packing.lanes() * self.features:
            x = Conv(self.features, (1, 1), self.strides, dtype=self.dtype, name="shortcut_conv")(y)
        y = Conv(self.features, strides=self.strides, dtype=self.dtype, name="conv0")(y)
        y = nn.relu(normalise(y, "norm1"))
        return x + Conv(self.features, dtype=self.dtype, name="conv1")(y)


class WideResNet(nn.Module):
    """Wide residual network of depth 6n + 4 and width k; 28 and 2 by default.

    A 3x3 convolution to 16 channels; three stages of n pre-activation blocks with 16k, 32k and 64k channels, where the
    last two stages start with stride 2; normalisation, ReLU and global average pooling to 64k features. No dropout.
    With a classifier WRN-28-2 has 1,467,610 parameters for 10 classes, and WRN-28-8 has 23,401,012 for 100.

    Source: Zagoruyko and Komodakis, "Wide Residual Networks", BMVC 2016.
    """

    depth: int = 28  # number of convolutions, 6n + 4
    width: int = 2  # k
    normalisation: str = "static"  # policy of `Normalisation`
    dtype: DTypeLike = jnp.float32  # dtype of the computation

    @property
    def narrow_channels(self):
        """Channels of the first stage, see `packing`."""
        return 16 * self.width

    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1):
        """Maps images [V*B, H, W, C] to features [V*B, 64k]; arguments as in `Heads`."""
        x = Conv(16, dtype=self.dtype, name="stem_conv")(images)
        for stage in range(3):
            features = 2**stage * self.narrow_channels
            names = [f"stage{stage}_block{block}" for block in range((self.depth - 4) // 6)]
            first = PreActivationBlock(features, 2 if stage else 1, self.normalisation, self.dtype, name=names[0])
            x = packing.in_parts(first, x, train, mask, num_views)
            others = [PreActivationBlock(features, 1, self.normalisation, self.dtype, name=name) for name in names[1:]]
            x = packing.in_turn(others, x, train, mask, num_views)
        x = nn.relu(Normalisation(self.normalisation, name="final_norm")(packing.joined(x), train, mask, num_views))
        return global_average_pool(x)
