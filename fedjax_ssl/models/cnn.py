"""A small convolutional network for small grey or colour images: digits and quick experiments."""

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_ssl.models.layers import Conv, FlatDense, check_sides, max_pool2d
from fedjax_ssl.models.normalisation import Normalisation, require_policy


class SmallCNN(nn.Module):
    """Two convolutions and one hidden layer.

    3x3 convolution to 16 channels, normalisation, ReLU, 2x2 max-pooling; 3x3 convolution to 32 channels,
    normalisation, ReLU, 2x2 max-pooling; flatten; linear to 128, normalisation, ReLU: 128 features. No layer
    has a bias. Initial kernels are Kaiming normal over the fan-out (convolutions) and LeCun normal (linear). Without
    the last normalisation the network dies within a few steps at the papers' learning rate of 0.03 with momentum 0.9.

    Images must be 4x4 or larger. The size of the linear layer depends on the size of the images. Raises UserError if
    images are smaller.
    """

    normalisation: str = "static"  # policy of `Normalisation`
    dtype: DTypeLike = jnp.float32  # dtype of the computation

    narrow_channels = 32  # channels of the second convolution, see `packing`

    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1):
        """Maps images [V*B, H, W, C] to features [V*B, 128]; arguments as in `Heads`."""
        check_sides("cnn", images, 4)
        x = images
        for layer, features in enumerate((16, 32)):
            x = Conv(features, dtype=self.dtype, name=f"conv{layer}")(x)
            x = Normalisation(self.normalisation, name=f"norm{layer}")(x, train, mask, num_views)
            x = max_pool2d(nn.relu(x))
        x = FlatDense(128, dtype=self.dtype, name="hidden")(x)
        return nn.relu(Normalisation(self.normalisation, name="norm2")(x, train, mask, num_views))


class LeNet(nn.Module):
    """RSCFed's simple CNN: two convolutions, two hidden layers and a projector.

    5x5 convolution to 6 channels without padding, ReLU, 2x2 max-pooling; 5x5 convolution to 16 channels, ReLU, 2x2
    max-pooling; flatten; linear to 120, ReLU, linear to 84, ReLU; then the projector: linear to 84, ReLU, linear to 256
    features. All layers have a bias. Initial kernels are Kaiming normal over the fan-out (convolutions) and LeCun
    normal (linear).

    Images must be 16x16 or larger. The size of the first linear layer depends on the size of the images.

    Source: Liang et al., RSCFed, CVPR 2022, and its public code. Raises UserError if `normalisation` is not 'none', or
    images are smaller.
    """

    normalisation: str = "none"  # 'none'
    dtype: DTypeLike = jnp.float32  # dtype of the computation

    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1):
        """Maps images [V*B, H, W, C] to features [V*B, 256]; arguments as in `Heads`."""
        del train, mask, num_views
        require_policy("lenet", self.normalisation, "none")
        check_sides("lenet", images, 16)
        x = images
        for layer, features in enumerate((6, 16)):
            x = Conv(features, (5, 5), dtype=self.dtype, name=f"conv{layer}")(x)[:, 2:-2, 2:-2]
            x = x + self.param(f"bias{layer}", nn.initializers.zeros, (features,)).astype(self.dtype)
            x = max_pool2d(nn.relu(x))
        x = x.reshape(x.shape[0], -1)
        for name, features in (("hidden0", 120), ("hidden1", 84), ("project0", 84)):
            x = nn.relu(nn.Dense(features, dtype=self.dtype, name=name)(x))
        return nn.Dense(256, dtype=self.dtype, name="project1")(x)
