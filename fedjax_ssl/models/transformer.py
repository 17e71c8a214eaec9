"""A small Transformer on token ids."""

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_ssl.models.normalisation import require_policy
from fedjax_ssl.models.vit import Block, heads_of

_position_init = nn.initializers.normal(0.02)


class Transformer(nn.Module):
    """Token and position embeddings, blocks, a layer normalisation, and the mean over all tokens but padding.

    Token 0 is padding: attention and the mean exclude it.
    """

    num_tokens: int  # number of ids
    depth: int = 2  # number of blocks
    width: int = 64  # dimension of a token's embedding and of the features
    normalisation: str = "group"  # 'group'
    dtype: DTypeLike = jnp.float32  # dtype of the computation

    @nn.compact
    def __call__(self, tokens, train=False, mask=None, num_views=1):
        """Maps token ids, int32 [V*B, L], to features [V*B, width]; arguments as in `Heads`.

        Mixtures are float32 [V*B, 3, L]: the ids of two texts, and the weight of the first. Their embeddings are
        averaged with this weight; the embedding of padding counts as 0.
        """
        del train, mask, num_views
        require_policy("transformer", self.normalisation, "group")
        embed = nn.Embed(self.num_tokens, self.width, dtype=self.dtype, name="embed", embedding_init=_position_init)
        if tokens.ndim == 3:
            ids, weight = tokens[:, :2].astype(jnp.int32), tokens[:, 2:]
            weights = jnp.concatenate([weight, 1 - weight], axis=1) * (ids != 0)
            x = jnp.sum(embed(ids) * weights[..., None].astype(self.dtype), axis=1)
            tokens = ids.max(axis=1)  # 0 where both are padding
        else:
            x = embed(tokens)
        seen = tokens != 0
        x = x + self.param("positions", _position_init, (tokens.shape[1], self.width)).astype(self.dtype)
        for block in range(self.depth):
            x = Block(heads_of(self.width, head_width=32), dtype=self.dtype, name=f"block{block}")(x, seen)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x) * seen[..., None]
        return x.sum(axis=1) / jnp.maximum(seen.sum(axis=1, keepdims=True), 1)
