"""Vision Transformers: small ones to train from scratch, and ones with the shapes of published weights.

Blocks are pre-norm (Xiong et al., ICML 2020). Layer normalisation treats each token by itself, which is the policy
'group' with one group. Other policies are refused, because Transformers use no batch statistics.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.models.normalisation import require_policy

QUICK_GELU = 1.702  # CLIP's GELU is x sigmoid(1.702 x)


class Block(nn.Module):
    """Self-attention and an MLP, each after a layer normalisation and with a residual connection.

    Parameters: `norm1`, `qkv` (queries, keys and values of all heads side by side, as in timm), `proj`, `norm2`, `fc1`,
    `fc2`, and with `layer_scale` the vectors `scale1` and `scale2`.
    """

    heads: int  # number of attention heads
    mlp_ratio: int = 4  # ratio of the MLP's hidden width to the block's width
    layer_scale: bool = False  # scales each channel before each addition (DINOv2); initially 1e-5
    quick_gelu: bool = False  # CLIP's activation instead of the exact GELU
    epsilon: float = 1e-6  # of the layer normalisations
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x, seen=None):
        """Maps tokens [B, T, D] to [B, T, D]; `seen`, bool [B, T], says which are attended to, None: all."""
        batch, tokens, width = x.shape
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        norm = functools.partial(nn.LayerNorm, epsilon=self.epsilon, dtype=self.dtype)

        def scaled(name, y):
            start = nn.initializers.constant(1e-5)
            return y * self.param(name, start, (width,)).astype(self.dtype) if self.layer_scale else y

        qkv = dense(3 * width, name="qkv")(norm(name="norm1")(x))
        query, key, value = jnp.moveaxis(qkv.reshape(batch, tokens, 3, self.heads, width // self.heads), 2, 0)
        mask = None if seen is None else seen[:, None, None]
        attended = nn.dot_product_attention(query, key, value, mask=mask, dtype=self.dtype)
        x = x + scaled("scale1", dense(width, name="proj")(attended.reshape(batch, tokens, width)))
        hidden = dense(self.mlp_ratio * width, name="fc1")(norm(name="norm2")(x))
        hidden = hidden * jax.nn.sigmoid(QUICK_GELU * hidden) if self.quick_gelu else nn.gelu(hidden, approximate=False)
        return x + scaled("scale2", dense(width, name="fc2")(hidden))


class ViT(nn.Module):
    """A Vision Transformer; the features [B, width] are the class token, or the mean over patches.

    The mean works equally well (Beyer et al., "Better plain ViT baselines for ImageNet-1k", 2022) and is the default.
    The default depth and width are half of those of ViT-Ti. ViT-S/16 with the class token has 21,665,664 parameters for
    images of 224 pixels.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021; ViT-S: Touvron et al. (DeiT), ICML 2021.
    """

    patch: int = 4  # side of a patch, in pixels
    depth: int = 6  # number of blocks
    width: int = 96  # dimension of a token and of the features
    head_width: int = 32  # channels of an attention head
    class_token: bool = False
    layer_scale: bool = False
    quick_gelu: bool = False
    pre_norm: bool = False  # CLIP: tokens are normalised before the first block, and patches have no bias
    epsilon: float = 1e-6
    normalisation: str = "group"  # 'group'
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1):
        """Maps images [V*B, H, W, C] to features [V*B, width]; arguments as in `Heads`."""
        require_policy("vit", self.normalisation, "group")
        batch, height, width, _ = images.shape
        side, patch = self.patch, (self.patch, self.patch)
        if height % side or width % side:
            raise UserError(f"patches of {side} x {side} do not divide images of {height} x {width} pixels")
        options: dict[str, Any] = {"padding": "VALID", "use_bias": not self.pre_norm, "dtype": self.dtype}
        x = nn.Conv(self.width, patch, patch, name="patches", **options)(images).reshape(batch, -1, self.width)
        if self.class_token:
            token = self.param("class_token", nn.initializers.normal(1e-6), (self.width,)).astype(self.dtype)
            x = jnp.concatenate([jnp.broadcast_to(token, (batch, 1, self.width)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:]).astype(self.dtype)
        if self.pre_norm:
            x = nn.LayerNorm(epsilon=self.epsilon, dtype=self.dtype, name="pre_norm")(x)
        for number in range(self.depth):
            options = {name: getattr(self, name) for name in ("layer_scale", "quick_gelu", "epsilon", "dtype")}
            x = Block(heads_of(self.width, self.head_width), **options, name=f"block{number}")(x)
        norm = nn.LayerNorm(epsilon=self.epsilon, dtype=self.dtype, name="norm")
        return norm(x[:, 0]) if self.class_token else norm(x).mean(axis=1)


def heads_of(width: int, head_width: int) -> int:
    """The number of attention heads: the largest divisor of the width that is at most width / head_width."""
    return next(number for number in range(max(1, width // head_width), 0, -1) if width % number == 0)
