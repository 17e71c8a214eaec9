"""Residual networks, with the stem for small images or that for large ones."""

from collections.abc import Sequence

import flax.linen as nn
import jax.numpy as jnp

from fedjax_ssl.models import packing
from fedjax_ssl.models.layers import Conv, global_average_pool, overlapping_max_pool2d
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


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution, the last to four times the channels, each followed by normalisation; a shortcut.

    The 3x3 convolution has the stride. ReLU between them and after the addition; the shortcut is `BasicBlock`'s.
    """

    features: int
    strides: int = 1
    normalisation: str = "static"
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x, train, mask, num_views):
        def normalise(y, name):
            return Normalisation(self.normalisation, name=name)(y, train, mask, num_views)

        y = Conv(self.features, (1, 1), dtype=self.dtype, name="conv0")(x)
        y = nn.relu(normalise(y, "norm0"))
        y = Conv(self.features, strides=self.strides, dtype=self.dtype, name="conv1")(y)
        y = nn.relu(normalise(y, "norm1"))
        y = Conv(4 * self.features, (1, 1), dtype=self.dtype, name="conv2")(y)
        y = normalise(y, "norm2")
        if x.shape != y.shape:
            x = Conv(4 * self.features, (1, 1), self.strides, dtype=self.dtype, name="shortcut_conv")(x)
            x = normalise(x, "shortcut_norm")
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A post-activation residual network, for images of about 32x32 or of about 224x224.

    The stem is one 3x3 convolution of stride 1 to `width` channels with normalisation and ReLU, without
    max-pooling; with `imagenet_stem` a 7x7 one of stride 2, followed by max-pooling, which leaves a sixteenth of the
    positions. Then stages of basic blocks, each with twice the channels of the one before, all but the first
    starting with stride 2; global average pooling to the last stage's channels (four times as many of bottlenecks).
    With a classifier for 10 classes ResNet-18 (2, 2, 2, 2 blocks, width 64) has 11,173,962 parameters, ResNet-34
    (3, 4, 6, 3) 21,282,122, ResNet-50 (the same of bottlenecks) 23,520,842, ResNet-8 (1, 1, 1 blocks, width 16)
    78,042, and at SAGE's width of 64 1,227,594. With ImageNet's stem ResNet-18 has 11,181,642, and 11,689,512 with its
    1,000 classes.

    Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016; three stages from 16 channels on are
    its networks for CIFAR-10 (section 4.2), here with a 1x1 convolution where the shape changes.
    """

    blocks: Sequence[int] = (2, 2, 2, 2)  # in each stage
    width: int = 64  # channels of the first stage (of its 3x3 convolutions)
    bottleneck: bool = False  # blocks of three convolutions instead of two
    imagenet_stem: bool = False  # the stem of the paper's networks for ImageNet (table 1)
    normalisation: str = "static"  # policy of `Normalisation`
    dtype: jnp.dtype = jnp.float32  # dtype of the computation

    @property
    def narrow_channels(self):
        """Of the first stage, see `packing`."""
        return self.width

    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1):
        """Maps images [V*B, H, W, C] to features [V*B, F]; arguments as in `Heads`."""
        size, stride = (7, 2) if self.imagenet_stem else (3, 1)
        x = Conv(self.width, (size, size), stride, dtype=self.dtype, name="stem_conv")(images)
        x = nn.relu(Normalisation(self.normalisation, name="stem_norm")(x, train, mask, num_views))
        if self.imagenet_stem:
            x = overlapping_max_pool2d(x)
        block_type = Bottleneck if self.bottleneck else BasicBlock
        for stage, blocks in enumerate(self.blocks):
            first, *others = (
                block_type(
                    self.width * 2**stage,
                    2 if stage > 0 and block == 0 else 1,
                    self.normalisation,
                    self.dtype,
                    name=f"stage{stage}_block{block}",
                )
                for block in range(blocks)
            )
            x = packing.in_parts(first, x, train, mask, num_views)
            x = packing.in_turn(others, x, train, mask, num_views)
        return global_average_pool(packing.joined(x))
