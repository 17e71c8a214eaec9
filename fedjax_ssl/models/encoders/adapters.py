"""A frozen encoder in use: as a function from images to features, or with low-rank adapters (LoRA) as a backbone.

The frozen weights are constants of the network and not parameters, so nothing trains, sends, averages or saves them.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.files import expanded
from fedjax_ssl.models.encoders.encoder import Encoder, Variables, encode, find_encoder
from fedjax_ssl.models.encoders.weights import load_weights
from fedjax_ssl.models.vit import ViT

ENCODED_TOGETHER = 64  # images in a batch, in training and prediction, so that features are equal to the bit


def frozen(options: Any) -> Callable[[jax.Array], jax.Array]:
    """A function that runs the encoder `config.encoder`: images, uint8 [B, H, W, C], to features, float32 [B, F].

    It is compiled for each new shape of images. Raises UserError if there is no such encoder or file, or the weights do
    not fit.
    """
    encoder = find_encoder(options.name)
    side = options.side or encoder.side
    variables = load_weights(expanded(options.weights), encoder, side)

    @jax.jit
    def features_of(variables: Any, pixels: jax.Array) -> jax.Array:
        return encode(encoder, variables, pixels.astype(jnp.float32) / 255, side)

    return lambda pixels: features_of(variables, pixels)


class Frozen:
    """Holds arrays in a field of a Flax module; Flax compares and hashes fields, which arrays do not support."""

    def __init__(self, variables: Variables):
        self.variables = variables


class WithAdapters(nn.Module):
    """An encoder with a trained low-rank addition to the queries, keys and values of its last blocks.

    The kernel W [D, 3 D] of such a block becomes W + A B. The parameters `A` [D, r] are initially normal, `B` [r, 3 D]
    is initially 0, so that training begins with the encoder itself.

    Source: Hu et al., "LoRA", ICLR 2022, section 4.1, with alpha = r.
    """

    encoder: Encoder
    frozen: Frozen  # the encoder's weights
    side: int  # to which images are resized, in pixels
    rank: int  # r
    blocks: int  # number of last blocks that are adapted

    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1):
        """Maps pixels from 0 to 1, [V*B, H, W, C], to features [V*B, F]; arguments as in `Heads`."""
        params: dict[str, Any] = dict(self.frozen.variables["params"])
        depth = self.encoder.module.depth
        for number in range(depth - self.blocks, depth):
            name = f"block{number}"
            kernel = jnp.asarray(params[name]["qkv"]["kernel"])
            width, wide = kernel.shape
            down = self.param(f"{name}_A", nn.initializers.normal(width**-0.5), (width, self.rank))
            up = self.param(f"{name}_B", nn.initializers.zeros, (self.rank, wide))
            qkv = {**params[name]["qkv"], "kernel": kernel + down @ up}
            params[name] = {**params[name], "qkv": qkv}
        return encode(self.encoder, {"params": params}, images, self.side)


def backbone_of(config: Any) -> WithAdapters | None:
    """The adapted encoder that `config.encoder` defines, computing in `model.dtype`; None without adapters.

    Raises UserError if the encoder is not a Vision Transformer or has too few blocks, or its weights cannot be used.
    """
    options = config.encoder
    rank, blocks = options.adapters.rank, options.adapters.blocks
    if options.name == "none" or not rank:
        return None
    encoder = find_encoder(options.name)
    depth = encoder.module.depth if isinstance(encoder.module, ViT) else 0
    if blocks > depth:
        raise UserError(
            f"encoder.adapters.blocks is {blocks}, but {options.name} has {depth} blocks of a Vision Transformer; "
            "lower it, or set encoder.adapters.rank to 0"
        )
    side = options.side or encoder.side
    variables = load_weights(expanded(options.weights), encoder, side)
    encoder = encoder._replace(module=encoder.module.clone(dtype=jnp.dtype(config.model.dtype)))
    return WithAdapters(encoder, Frozen(jax.tree.map(jnp.asarray, variables)), side, rank, blocks)
