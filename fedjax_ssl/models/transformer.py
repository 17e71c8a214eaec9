"""Small Transformers: of token ids, and of the patches of an image.

Blocks normalise first (Xiong et al., ICML 2020). Each token is normalised by itself, which is the policy 'group' with
one group; statistics of a batch have no place in a Transformer, and other policies are refused.
"""

import functools

import flax.linen as nn
import jax.numpy as jnp

from fedjax_ssl.errors import UserError

HEAD_WIDTH = 32  # channels of an attention head
_position_init = nn.initializers.normal(0.02)


class Block(nn.Module):
    """Self-attention and two linear layers, each behind a layer normalisation and added to its input."""

    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x, seen):
        """Maps tokens [N, L, width] to as many.

        Args:
            x: the tokens.
            seen: bool [N, L], which of them others attend to; None: all.
        """
        width = x.shape[-1]
        heads = max(1, width // HEAD_WIDTH)
        head = functools.partial(nn.DenseGeneral, (heads, width // heads), dtype=self.dtype)
        y = nn.LayerNorm(dtype=self.dtype, name="norm0")(x)
        query, key, value = (head(name=name)(y) for name in ("query", "key", "value"))
        scores = jnp.einsum("nqhd,nkhd->nhqk", query, key).astype(jnp.float32) * query.shape[-1] ** -0.5
        if seen is not None:
            scores = jnp.where(seen[:, None, None], scores, -1e9)
        y = jnp.einsum("nhqk,nkhd->nqhd", nn.softmax(scores).astype(self.dtype), value)
        x = x + nn.DenseGeneral(width, axis=(-2, -1), dtype=self.dtype, name="out")(y)
        y = nn.LayerNorm(dtype=self.dtype, name="norm1")(x)
        y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype, name="hidden")(y))
        return x + nn.Dense(width, dtype=self.dtype, name="back")(y)


class Transformer(nn.Module):
    """Token and position embeddings, blocks, a layer normalisation, and the mean over the tokens that are there.

    Token 0 is padding: nobody attends to it, and it takes no part in the mean.
    """

    num_tokens: int  # how many ids there are
    depth: int = 2  # blocks
    width: int = 64  # of a token's embedding, and of the features
    normalisation: str = "group"  # 'group'
    dtype: jnp.dtype = jnp.float32  # dtype of the computation

    @nn.compact
    def __call__(self, tokens, train=False, mask=None, num_views=1):
        """Maps token ids, int32 [V*B, L], to features [V*B, width]; arguments as in `Heads`."""
        del train, mask, num_views
        check_normalisation("transformer", self.normalisation)
        seen = tokens != 0
        embed = nn.Embed(self.num_tokens, self.width, dtype=self.dtype, name="embed", embedding_init=_position_init)
        x = embed(tokens) + self.param("positions", _position_init, (tokens.shape[1], self.width)).astype(self.dtype)
        for block in range(self.depth):
            x = Block(self.dtype, name=f"block{block}")(x, seen)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x) * seen[..., None]
        return x.sum(axis=1) / jnp.maximum(seen.sum(axis=1, keepdims=True), 1)


class VisionTransformer(nn.Module):
    """Patches of an image as tokens, with position embeddings; blocks, a layer normalisation, and the mean of all.

    Without a class token: the mean of the patches does as well (Beyer et al., "Better plain ViT baselines for
    ImageNet-1k", 2022). By default as deep and half as wide as ViT-Ti.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021.
    """

    patch: int = 4  # side of a patch, in pixels
    depth: int = 6  # blocks
    width: int = 96  # of a token, and of the features
    normalisation: str = "group"  # 'group'
    dtype: jnp.dtype = jnp.float32  # dtype of the computation

    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1):
        """Maps images [V*B, H, W, C] to features [V*B, width]; arguments as in `Heads`."""
        del train, mask, num_views
        check_normalisation("vit", self.normalisation)
        batch, height, width, channels = images.shape
        rows, columns = height // self.patch, width // self.patch
        if (rows * self.patch, columns * self.patch) != (height, width):
            raise UserError(f"model.patch={self.patch} does not divide images of {height} x {width} pixels")
        patches = images.reshape(batch, rows, self.patch, columns, self.patch, channels).swapaxes(2, 3)
        x = nn.Dense(self.width, dtype=self.dtype, name="embed")(patches.reshape(batch, rows * columns, -1))
        x = x + self.param("positions", _position_init, (rows * columns, self.width)).astype(self.dtype)
        for block in range(self.depth):
            x = Block(self.dtype, name=f"block{block}")(x, None)
        return nn.LayerNorm(dtype=self.dtype, name="norm")(x).mean(axis=1)


def check_normalisation(name: str, policy: str) -> None:
    """Raises a UserError unless each example is normalised by itself."""
    if policy != "group":
        raise UserError(
            f"model.name={name} normalises each token by itself: set model.normalisation to 'group', not {policy!r}"
        )
