"""EfficientNet-Lite0: a small network of depthwise convolutions, whose ImageNet weights are easy to get."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from fedjax_ssl.base.devices import platform
from fedjax_ssl.models import passes
from fedjax_ssl.models.layers import convolution_init, global_average_pool
from fedjax_ssl.models.normalisation import Normalisation

# For each stage: number of blocks, kernel size, stride of its first block, expansion, channels.
LITE0 = (
    (1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112), (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)  # fmt: skip


class SameConv(nn.Module):
    """Convolution without bias, with TensorFlow's "SAME" padding; parameter `kernel` [size, size, in / groups, out]."""

    features: int  # output channels
    size: int  # side of the kernel
    stride: int
    groups: int  # 1, or the number of channels
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x):
        size, stride = self.size, self.stride
        shape = (size, size, x.shape[-1] // self.groups, self.features)
        kernel = self.param("kernel", convolution_init, shape, jnp.float32).astype(self.dtype)
        pads = lax.padtype_to_pads(x.shape[1:3], (size, size), (stride, stride), "SAME")
        if self.groups == 1 or platform() != "cpu":
            return passes.forward(x, kernel, passes.Window((stride, stride), (pads[0], pads[1])))
        # On CPUs XLA's depthwise convolution is many times slower than this sum of shifted images.
        padded = jnp.pad(x, ((0, 0), *pads, (0, 0)))
        # Rows and columns from the first to the last pixel of a strided slice.
        below, right = (stride * (-(-side // stride) - 1) + 1 for side in x.shape[1:3])
        return sum(
            padded[:, row : row + below : stride, column : column + right : stride] * kernel[row, column, 0]
            for row in range(size)
            for column in range(size)
        )


class EfficientNet(nn.Module):
    """EfficientNet-Lite0: no squeeze-and-excitation, ReLU6; features [B, 1280], 3,371,008 parameters.

    The padding is TensorFlow's "SAME", as in the network of the published weights. That network adds 1e-3 to variances
    in normalisation; the conversion of weights corrects for the difference (`fedjax_ssl/models/encoders/names.py`).

    Source: Tan and Le, "EfficientNet", ICML 2019; Lite0 by R. Liu, TensorFlow's blog, March 2020.
    """

    normalisation: str = "running"  # policy of `Normalisation`
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1):
        """Maps images [V*B, H, W, C] to features [V*B, F]; arguments as in `Heads`."""

        def layer(x, name, features, size=1, stride=1, groups=1, active=True):
            x = SameConv(features, size, stride, groups, self.dtype, name=name)(x)
            x = Normalisation(self.normalisation, name=f"{name}_norm")(x, train, mask, num_views)
            return jax.nn.relu6(x) if active else x

        x = layer(images.astype(self.dtype), "stem", 32, 3, 2)
        number = 0
        for blocks, size, stride, expansion, channels in LITE0:
            for block in range(blocks):
                name, before = f"block{number}", x
                hidden = expansion * x.shape[-1]
                x = layer(x, f"{name}_expand", hidden) if expansion > 1 else x
                x = layer(x, f"{name}_depthwise", hidden, size, stride if block == 0 else 1, groups=hidden)
                x = layer(x, f"{name}_project", channels, active=False)
                x = before + x if x.shape == before.shape else x
                number += 1
        return global_average_pool(layer(x, "head", 1280))
