"""Residual networks, with a stem for small or for large images."""

from collections.abc import Sequence

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_ssl.models import packing
from fedjax_ssl.models.layers import Conv, global_average_pool, overlapping_max_pool2d
from fedjax_ssl.models.normalisation import Normalisation


class Block(nn.Module):
    """Convolutions, each followed by normalisation, and a shortcut; ReLU after each but the last, and after the sum.

    There are two 3x3 convolutions; or, in a bottleneck, a 1x1, a 3x3 and a 1x1 convolution, the last with four times as
    many channels. The first 3x3 convolution has the stride. The shortcut is the identity, or a 1x1 convolution and a
    normalisation if the shape changes.
    """

    features: int
    strides: int = 1
    normalisation: str = "static"
    dtype: DTypeLike = jnp.float32
    bottleneck: bool = False

    @nn.compact
    def __call__(self, x, train, mask, num_views):
        def layer(x, features, size, strides, names):
            x = Conv(features, (size, size), strides, dtype=self.dtype, name=names[0])(x)
            return Normalisation(self.normalisation, name=names[1])(x, train, mask, num_views)

        y, width = x, self.features * (4 if self.bottleneck else 1)
        *before, last = ((1, 1), (3, self.strides), (1, 1)) if self.bottleneck else ((3, self.strides), (3, 1))
        for number, (size, strides) in enumerate(before):
            y = nn.relu(layer(y, self.features, size, strides, (f"conv{number}", f"norm{number}")))
        y = layer(y, width, *last, (f"conv{len(before)}", f"norm{len(before)}"))
        if x.shape != y.shape:
            x = layer(x, width, 1, self.strides, ("shortcut_conv", "shortcut_norm"))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A post-activation residual network, for images of about 32x32 or of about 224x224.

    The stem is a 3x3 convolution of stride 1 to `width` channels with normalisation and ReLU, without max-pooling. With
    `imagenet_stem` it is a 7x7 convolution of stride 2, followed by max-pooling; together they leave a sixteenth of the
    positions. Stages of blocks follow. Each stage has twice the channels of the previous one, and all but the first
    start with stride 2. Global average pooling gives as many features as the last stage has channels (four times as
    many for bottlenecks).

    Parameters with a classifier for 10 classes: 11,173,962 for ResNet-18 (2, 2, 2, 2 blocks, width 64), 21,282,122 for
    ResNet-34 (3, 4, 6, 3), 23,520,842 for ResNet-50 (3, 4, 6, 3 bottlenecks), 78,042 for ResNet-8 (1, 1, 1 blocks,
    width 16), and 1,227,594 for ResNet-8 at SAGE's width of 64. With ImageNet's stem ResNet-18 has 11,181,642, and
    11,689,512 for 1,000 classes.

    Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016. Three stages from 16 channels on are
    its networks for CIFAR-10 (section 4.2), here with a 1x1 convolution in the shortcut if the shape changes.
    """

    blocks: Sequence[int] = (2, 2, 2, 2)  # in each stage
    width: int = 64  # channels of the first stage (of its 3x3 convolutions)
    bottleneck: bool = False  # blocks of three convolutions instead of two
    imagenet_stem: bool = False  # the stem of the paper's networks for ImageNet (table 1)
    normalisation: str = "static"  # policy of `Normalisation`
    dtype: DTypeLike = jnp.float32  # dtype of the computation

    @property
    def narrow_channels(self):
        """Channels of the first stage, see `packing`."""
        return self.width

    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1):
        """Maps images [V*B, H, W, C] to features [V*B, F]; arguments as in `Heads`."""
        size, stride = (7, 2) if self.imagenet_stem else (3, 1)
        x = Conv(self.width, (size, size), stride, dtype=self.dtype, name="stem_conv")(images)
        x = nn.relu(Normalisation(self.normalisation, name="stem_norm")(x, train, mask, num_views))
        if self.imagenet_stem:
            x = overlapping_max_pool2d(x)
        of_all = (self.normalisation, self.dtype, self.bottleneck)
        for stage, blocks in enumerate(self.blocks):
            features, names = self.width * 2**stage, [f"stage{stage}_block{block}" for block in range(blocks)]
            first = Block(features, 2 if stage else 1, *of_all, name=names[0])
            x = packing.in_parts(first, x, train, mask, num_views)
            others = [Block(features, 1, *of_all, name=name) for name in names[1:]]
            x = packing.in_turn(others, x, train, mask, num_views)
        return global_average_pool(packing.joined(x))
