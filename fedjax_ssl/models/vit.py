"""Vision Transformers: from scratch on small images, and with the shapes of published weights."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

QUICK_GELU = 1.702  # CLIP's GELU is x sigmoid(1.702 x)


class Block(nn.Module):
    """Self-attention and an MLP, each after a layer normalisation, each added to what went in.

    Parameters: `norm1`, `qkv` (queries, keys and values of all heads side by side, as timm has them), `proj`, `norm2`,
    `fc1`, `fc2`, and with `layer_scale` the vectors `scale1` and `scale2`.
    """

    heads: int
    mlp_ratio: int = 4  # the MLP's hidden width over the width
    layer_scale: bool = False  # a factor for each channel before each addition (DINOv2's); starts at 1e-5
    quick_gelu: bool = False  # CLIP's activation, in place of the exact GELU
    epsilon: float = 1e-6  # of the layer normalisations
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        """Maps tokens [B, T, D] to [B, T, D]."""
        batch, tokens, width = x.shape
        dense = functools.partial(nn.Dense, dtype=self.dtype, kernel_init=nn.initializers.truncated_normal(0.02))
        norm = functools.partial(nn.LayerNorm, epsilon=self.epsilon, dtype=self.dtype)

        def scaled(name, y):
            start = nn.initializers.constant(1e-5)
            return y * self.param(name, start, (width,)).astype(self.dtype) if self.layer_scale else y

        qkv = dense(3 * width, name="qkv")(norm(name="norm1")(x))
        query, key, value = jnp.moveaxis(qkv.reshape(batch, tokens, 3, self.heads, width // self.heads), 2, 0)
        attended = nn.dot_product_attention(query, key, value, dtype=self.dtype)
        x = x + scaled("scale1", dense(width, name="proj")(attended.reshape(batch, tokens, width)))
        hidden = dense(self.mlp_ratio * width, name="fc1")(norm(name="norm2")(x))
        hidden = hidden * jax.nn.sigmoid(QUICK_GELU * hidden) if self.quick_gelu else nn.gelu(hidden, approximate=False)
        return x + scaled("scale2", dense(width, name="fc2")(hidden))


class ViT(nn.Module):
    """A Vision Transformer; the features are the class token's, after the last normalisation: [B, width].

    ViT-S/16 for images of 224 pixels has 21,665,664 parameters. Each image is mapped by itself, so the policies of
    batch normalisation do not matter.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021; ViT-S: Touvron et al. (DeiT), ICML 2021.
    """

    patch: int = 16  # side of the square patches in pixels; images are cut to a multiple of it
    width: int = 384
    depth: int = 12  # blocks
    heads: int = 6
    layer_scale: bool = False
    quick_gelu: bool = False
    pre_norm: bool = False  # normalises the tokens before the first block, and patches have no bias (CLIP's)
    epsilon: float = 1e-6
    normalisation: str = "none"  # not read: every backbone's factory takes it
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1):
        """Maps images [V*B, H, W, C] to features [V*B, width]; arguments as in `Heads`."""
        side = (self.patch, self.patch)
        x = nn.Conv(
            self.width, side, side, padding="VALID", use_bias=not self.pre_norm, dtype=self.dtype, name="patches"
        )(images)
        x = x.reshape(len(x), -1, self.width)
        token = self.param("class_token", nn.initializers.normal(1e-6), (self.width,))
        x = jnp.concatenate([jnp.broadcast_to(token.astype(self.dtype), (len(x), 1, self.width)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:]).astype(self.dtype)
        if self.pre_norm:
            x = nn.LayerNorm(epsilon=self.epsilon, dtype=self.dtype, name="pre_norm")(x)
        for number in range(self.depth):
            options = {name: getattr(self, name) for name in ("heads", "layer_scale", "quick_gelu", "epsilon", "dtype")}
            x = Block(**options, name=f"block{number}")(x)
        return nn.LayerNorm(epsilon=self.epsilon, dtype=self.dtype, name="norm")(x[:, 0])
