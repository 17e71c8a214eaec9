"""A model as pure functions of raw images: pixel normalisation, forward passes, and which statistics it keeps."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_ssl.learning.batches import map_batches
from fedjax_ssl.models import Outputs, build_model, check_backbone, is_own

Params = Any
BatchStats = Any


class Network(NamedTuple):
    """A Flax model together with what it needs to take raw images.

    Attributes:
        model: the double-headed (or single-headed) Flax module.
        mean, std: per channel, in units of [0, 1] pixel values; they belong to the data set.
        image_shape: (height, width, channels).
        normalisation: the batch normalisation policy, 'static', 'running' or 'group'; 'group' for a user's own
          backbone that keeps no statistics, whatever the configuration says.
    """

    model: nn.Module
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_shape: tuple[int, int, int]
    normalisation: str

    def init(self, key: jax.Array) -> tuple[Params, BatchStats]:
        """Fresh parameters and statistics (an empty dict where the policy keeps none)."""
        variables = self.model.init(key, jnp.zeros((1, *self.image_shape)))
        return variables["params"], variables.get("batch_stats", {})

    def normalise(self, images: jax.Array) -> jax.Array:
        """Images with values in 0..255, of any dtype, to float32 with the data set's mean 0 and deviation 1."""
        return (images.astype(jnp.float32) / 255.0 - jnp.array(self.mean)) / jnp.array(self.std)

    def predict(self, params: Params, batch_stats: BatchStats, images: jax.Array) -> Outputs:
        """Evaluation mode: images [B, H, W, C] in 0..255 to Outputs, each image on its own."""
        variables = {"params": params, "batch_stats": batch_stats}
        return self.model.apply(variables, self.normalise(images), train=False)

    def predict_with_features(
        self, params: Params, batch_stats: BatchStats, images: jax.Array
    ) -> tuple[Outputs, jax.Array]:
        """The same, and the backbone's features float32 [B, F]."""
        variables = {"params": params, "batch_stats": batch_stats}
        outputs, seen = self.model.apply(variables, self.normalise(images), train=False, mutable=["intermediates"])
        return outputs, seen["intermediates"]["features"][0]

    def predict_rows(
        self, params: Params, batch_stats: BatchStats, images: jax.Array, rows: jax.Array, batch_size: int
    ) -> Outputs:
        """The same for rows [n] of a table of images, at most `batch_size` of them at a time."""
        return map_batches(lambda r: self.predict(params, batch_stats, images[r]), rows, batch_size)

    def train(
        self, params: Params, batch_stats: BatchStats, views: tuple[jax.Array, ...], mask: jax.Array
    ) -> tuple[tuple[Outputs, ...], BatchStats]:
        """Training mode: several views of one batch in one pass, each with batch statistics of its own.

        Args:
            params, batch_stats: of the model.
            views: each [B, H, W, C] in 0..255. They share their convolutions, not their statistics.
            mask: bool [B]; False marks the padding of a short batch, which takes no part in any statistics.

        Returns:
            One Outputs a view, and the statistics after this batch ('static' keeps none: unchanged).
        """
        outputs, updated = self._apply_train(params, batch_stats, views, mask)
        return outputs, updated if self.normalisation == "running" else batch_stats

    def batch_statistics(
        self, params: Params, batch_stats: BatchStats, images: jax.Array, mask: jax.Array
    ) -> BatchStats:
        """The 'static' policy's statistics of this one batch: mean and unbiased variance of every layer's input."""
        return self._apply_train(params, batch_stats, (images,), mask)[1]

    def _apply_train(self, params, batch_stats, views, mask):
        outputs, updated = self.model.apply(
            {"params": params, "batch_stats": batch_stats},
            self.normalise(jnp.concatenate([view.astype(jnp.float32) for view in views])),
            train=True,
            mask=jnp.tile(mask, len(views)),
            num_views=len(views),
            mutable=["batch_stats"],
        )
        per_view = jax.tree.map(lambda x: jnp.split(x, len(views)), outputs)
        logits, embeddings = per_view.logits, per_view.embeddings or [None] * len(views)
        views_out = tuple(Outputs(*pair) for pair in zip(logits, embeddings))
        return views_out, updated.get("batch_stats", {})


def build_network(config, facts: dict[str, Any], double_head: bool) -> Network:
    """The network that `config.model` names.

    Args:
        config: the configuration.
        facts: of the data set, see `fedjax_ssl.data.dataset_facts`; its classes, image shape, mean and std are read.
        double_head: whether it has the anchor head, `model.anchor_dim` wide.

    Raises:
        UserError: a name is unknown, or a user's own backbone cannot be used.
    """
    model, image_shape = config.model.copy_and_resolve_references(), tuple(facts["image_shape"])
    if not double_head:
        model.anchor_dim = 0
    built = build_model(model, facts["num_classes"])
    keeps = not is_own(model.name) or check_backbone(model.name, built.backbone, image_shape, model.normalisation)
    return Network(
        model=built,
        mean=tuple(facts["mean"]),
        std=tuple(facts["std"]),
        image_shape=image_shape,
        # Without statistics there are none to be taken, sent or averaged.
        normalisation=model.normalisation if keeps else "group",
    )
