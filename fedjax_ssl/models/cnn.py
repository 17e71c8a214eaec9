"""A small convolutional network for small grey or colour images: digits and quick experiments."""

import flax.linen as nn
import jax.numpy as jnp

from fedjax_ssl.models.layers import Conv, max_pool2d
from fedjax_ssl.models.normalisation import Normalisation


class SmallCNN(nn.Module):
    """Two convolutions and one hidden layer.

    3x3 convolution to 32 channels, normalisation, ReLU, 2x2 max-pooling; 3x3 convolution to 64 channels,
    normalisation, ReLU, 2x2 max-pooling; flatten; linear to 128, ReLU: 128 features. The convolutions have
    no bias. Kernels start Kaiming normal over the fan-out (convolutions) and LeCun normal (linear), biases 0.

    Any image of 8x8 or more; the linear layer's size depends on the image's.

    Attributes:
      normalisation: policy of `Normalisation`.
      dtype: dtype of the computation.
    """

    normalisation: str = "static"
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1):
        """Maps images [V*B, H, W, C] to features [V*B, 128]; arguments as in `DoubleHead`."""
        x = images
        for layer, features in enumerate((32, 64)):
            x = Conv(features, dtype=self.dtype, name=f"conv{layer}")(x)
            x = Normalisation(self.normalisation, name=f"norm{layer}")(x, train, mask, num_views)
            x = max_pool2d(nn.relu(x))
        x = x.reshape(x.shape[0], -1)
        return nn.relu(nn.Dense(128, dtype=self.dtype, name="hidden")(x))
