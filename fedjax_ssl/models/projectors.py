"""Projection heads: one with a hidden layer, and a square linear map."""

import flax.linen as nn

from fedjax_ssl.models.heads import Linear
from fedjax_ssl.models.normalisation import Normalisation


class Projector(nn.Module):
    """One hidden layer: features [V*B, F], or another head's outputs, to [V*B, dim]."""

    hidden: int  # width of the layer, which is normalised; then ReLU
    dim: int  # of the outputs; 0: as many as there are inputs
    normalisation: str  # policy of `Normalisation`. No layer has a bias in front of one, where it would change nothing.
    normalised: bool = False  # whether the outputs are normalised, too, without scale and shift
    reads: str = ""  # the head whose outputs it takes in place of the features; '': none

    @nn.compact
    def __call__(self, features, train=False, mask=None, num_views=1):
        """The arguments are those of every head."""
        has_bias = self.normalisation == "none"
        x = Linear(self.hidden, use_bias=has_bias, name="first")(features)
        x = Normalisation(self.normalisation, name="norm")(x, train, mask, num_views)
        width = self.dim or features.shape[-1]
        x = Linear(width, use_bias=has_bias or not self.normalised, name="second")(nn.relu(x))
        if self.normalised:
            x = Normalisation(self.normalisation, affine=False, name="last_norm")(x, train, mask, num_views)
        return x


class Projection(nn.Module):
    """A linear map of features [B, F] to as many numbers (ProxyFL)."""

    use_bias: bool  # whether it has a bias

    @nn.compact
    def __call__(self, features, train=False, mask=None, num_views=1):
        """The arguments are those of every head."""
        width = features.shape[-1]
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (width, width))
        bias = self.param("bias", nn.initializers.zeros_init(), (width,)) if self.use_bias else 0.0
        return features @ kernel + bias
