"""A model as pure functions of raw images: pixel normalisation, forward passes, batch statistics."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_ssl.learning.batches import map_batches
from fedjax_ssl.learning.sgd import BatchStats, Model
from fedjax_ssl.models import Outputs, build_model, check_backbone, is_own


class Network(NamedTuple):
    """A Flax model together with what it needs to take raw images.

    Attributes:
        module: the Flax module, a `Heads`.
        mean, std: per channel, in units of [0, 1] pixel values; they belong to the data set.
        image_shape: (height, width, channels).
        normalisation: the batch normalisation policy, one of `POLICIES`; of a user's backbone that has no statistics
          'group', or 'none'.
        embedding: name of the head that represents an image; '': the backbone's features do.
    """

    module: nn.Module
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_shape: tuple[int, int, int]
    normalisation: str
    embedding: str = ""

    def init(self, key: jax.Array) -> Model:
        """A fresh model."""
        variables = self.module.init(key, jnp.zeros((1, *self.image_shape)))
        return Model(variables["params"], variables.get("batch_stats", {}))

    def normalise(self, images: jax.Array) -> jax.Array:
        """Images with values in 0..255, of any dtype, to float32 with the data set's mean 0 and deviation 1."""
        return (images.astype(jnp.float32) / 255.0 - jnp.array(self.mean)) / jnp.array(self.std)

    def predict(self, model: Model, images: jax.Array) -> Outputs:
        """Evaluation mode: images [B, H, W, C] in 0..255 to Outputs, each image independent of the others."""
        return self.module.apply(model._asdict(), self.normalise(images), train=False)

    def probabilities(self, model: Model, images: jax.Array) -> jax.Array:
        """The classifier's softmax in evaluation mode: float32 [B, C]."""
        return jax.nn.softmax(self.predict(model, images).logits)

    def embeddings(self, outputs: Outputs) -> jax.Array:
        """What represents an image in pictures and predictions: float32 [B, D]."""
        return outputs.heads[self.embedding] if self.embedding else outputs.features

    def predict_rows(self, model: Model, images: jax.Array, rows: jax.Array, batch_size: int) -> Outputs:
        """`predict` for rows [n] of a table of images, at most `batch_size` of them at a time."""
        return map_batches(lambda r: self.predict(model, images[r]), rows, batch_size)

    def train(
        self, model: Model, views: tuple[jax.Array, ...], mask: jax.Array
    ) -> tuple[tuple[Outputs, ...], BatchStats]:
        """Training mode: several views of one batch in one pass, each with its own batch statistics.

        Args:
            model: in training.
            views: each [B, H, W, C] in 0..255. They share their convolutions, not their statistics.
            mask: bool [B]; False marks the padding of a short batch, which takes no part in any statistics.

        Returns:
            One Outputs a view, and the statistics after this batch (under 'static' they are unchanged).
        """
        outputs, updated = self._apply_train(model, views, mask)
        return outputs, updated if self.normalisation == "running" else model.batch_stats

    def batch_statistics(self, model: Model, images: jax.Array, mask: jax.Array) -> BatchStats:
        """The 'static' policy's statistics of this one batch: mean and unbiased variance of every layer's input."""
        return self._apply_train(model, (images,), mask)[1]

    def _apply_train(self, model, views, mask):
        outputs, updated = self.module.apply(
            model._asdict(),
            self.normalise(jnp.concatenate([view.astype(jnp.float32) for view in views])),
            train=True,
            mask=jnp.tile(mask, len(views)),
            num_views=len(views),
            mutable=["batch_stats"],
        )
        size = len(mask)
        per_view = [jax.tree.map(lambda x, v=v: x[v * size : (v + 1) * size], outputs) for v in range(len(views))]
        return tuple(per_view), updated.get("batch_stats", {})


def build_network(
    config, facts: dict[str, Any], heads: Mapping[str, Callable] | None = None, embedding: str = ""
) -> Network:
    """The network that `config.model` names.

    Args:
        config: the configuration.
        facts: of the data set, see `fedjax_ssl.data.dataset_facts`; its classes, image shape, mean and std are read.
        heads: those of the method, see `build_model`.
        embedding: the head that represents an image; '': the features.

    Raises:
        UserError: a name is unknown, or a user's own backbone cannot be used.
    """
    section, image_shape = config.model, tuple(facts["image_shape"])
    module = build_model(section, facts["num_classes"], heads)
    own = is_own(section.name)
    keeps = not own or check_backbone(section.name, module.backbone, image_shape, section.normalisation)
    return Network(
        module=module,
        mean=tuple(facts["mean"]),
        std=tuple(facts["std"]),
        image_shape=image_shape,
        # A backbone without statistics has none to recompute, send or average.
        normalisation=section.normalisation if keeps or section.normalisation == "none" else "group",
        embedding=embedding,
    )
