"""Projection heads: one with a hidden layer, those of BYOL, and a square linear map."""

import functools

import flax.linen as nn

from fedjax_ssl.models.heads import Linear
from fedjax_ssl.models.normalisation import Normalisation


class Projector(nn.Module):
    """One hidden layer: features [V*B, F], or another head's outputs, to [V*B, dim]."""

    hidden: int  # width of the hidden layer, before normalisation and ReLU; 0: three times the number of inputs
    dim: int  # number of outputs; 0: the number of inputs
    # Policy of `Normalisation`. Layers before a normalisation have no bias, because it would change nothing.
    normalisation: str
    normalised: bool = False  # whether the outputs are normalised as well, without scale and shift
    reads: str = ""  # name of the head whose outputs are its input; '': its input is the features

    @nn.compact
    def __call__(self, features, train=False, mask=None, num_views=1):
        """Maps inputs to outputs; arguments as for every head, see `Heads`."""
        has_bias = self.normalisation == "none"
        x = Linear(self.hidden or 3 * features.shape[-1], use_bias=has_bias, name="first")(features)
        x = Normalisation(self.normalisation, name="norm")(x, train, mask, num_views)
        width = self.dim or features.shape[-1]
        x = Linear(width, use_bias=has_bias or not self.normalised, name="second")(nn.relu(x))
        if self.normalised:
            x = Normalisation(self.normalisation, affine=False, name="last_norm")(x, train, mask, num_views)
        return x


def _byol_head(reads: str, model) -> functools.partial[Projector]:
    return functools.partial(Projector, model.projector_hidden, model.projector_dim, model.normalisation, reads=reads)


# BYOL's: a projector on the features and a predictor on the projector's outputs. Name -> function from the section
# `config.model` to the head's factory, as in `Entry.heads`.
BYOL_HEADS = {"projector": functools.partial(_byol_head, ""), "predictor": functools.partial(_byol_head, "projector")}


class Projection(nn.Module):
    """A linear map from features [B, F] to [B, F] (ProxyFL)."""

    use_bias: bool  # whether it has a bias

    @nn.compact
    def __call__(self, features, train=False, mask=None, num_views=1):
        """Maps features to outputs; arguments as for every head, see `Heads`."""
        width = features.shape[-1]
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (width, width))
        return features @ kernel + (self.param("bias", nn.initializers.zeros_init(), (width,)) if self.use_bias else 0)
