"""A backbone with two linear heads: class logits and anchor embeddings."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp


class Outputs(NamedTuple):
    """What a model gives for a batch of B images, in float32."""

    logits: jax.Array  # [B, C]
    embeddings: jax.Array | None  # [B, D], the anchor head's; None for a model without one


class DoubleHead(nn.Module):
    """Backbone, linear classifier and linear anchor head (FedAnchor, Qiu et al., 2024, section 4.1).

    The parameters' top level is 'backbone', 'classifier' and, unless `anchor_dim` is 0, 'anchor_head'. The
    heads' kernels start LeCun normal (variance 1 / fan-in), their biases 0; both are computed in float32.

    Attributes:
        backbone: module from (images, train, mask, num_views) to features [B, F].
        num_classes: C.
        anchor_dim: D, the size of the anchor embeddings; 0 for a single head.
    """

    backbone: nn.Module
    num_classes: int
    anchor_dim: int = 128

    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1):
        """Computes logits and embeddings.

        Args:
            images: float32 [V*B, H, W, C], normalised, view-major: the first B rows are view 0, and so on.
            train: whether batch normalisation uses the statistics of the batch.
            mask: bool or float [V*B]; rows with 0 are padding. They take no part in batch statistics, and their
              outputs are meaningless.
            num_views: V. The views share every convolution call, but each has its own batch statistics, as if
              they had been passed one after the other.

        Returns:
            Outputs.
        """
        features = self.backbone(images, train, mask, num_views).astype(jnp.float32)
        self.sow("intermediates", "features", features)  # costs nothing unless somebody asks for it
        logits = nn.Dense(self.num_classes, name="classifier")(features)
        if self.anchor_dim == 0:
            return Outputs(logits, None)
        return Outputs(logits, nn.Dense(self.anchor_dim, name="anchor_head")(features))
