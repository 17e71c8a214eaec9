"""A model as pure functions of stored inputs: forward passes and batch statistics."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_ssl.models import Adapted, Outputs, build_model, check_backbone, heads_drawn
from fedjax_ssl.models.normalisation import pooled_statistics
from fedjax_ssl.ops.batches import map_batches
from fedjax_ssl.ops.sgd import BatchStats, Model
from fedjax_ssl.ops.trees import without


class Network(NamedTuple):
    """A Flax model together with the kind of its inputs.

    A method may have a companion: a second network that is sent, averaged and saved together with the first. Its
    parameters and statistics are entries of the same `Model` under its name, so code for the parts of a model handles
    it like any other part. The methods below ignore companions. To run one, call `network.companions[name]` with
    `companion_model(model, name)`.
    """

    module: nn.Module  # the Flax module, a `Heads`
    inputs: Any  # what a backbone takes of an example, see `fedjax_ssl.data.kinds.Inputs`
    # Policy of batch normalisation, one of `POLICIES`; 'group' or 'none' if the backbone has no statistics.
    normalisation: str
    embedding: str = ""  # name of the head whose outputs represent an image; '': the backbone's features
    companions: Mapping[str, "Network"] = {}  # name -> further network
    # Initial values of parts of the model, see `init_from`; None: the whole model is drawn.
    given: Model | None = None
    # Sums of normalisation statistics that clients sent, used instead of their images, see
    # `fedjax_ssl.server.statistics`; None: the images are available.
    gathered: Any = None

    def init(self, key: jax.Array) -> Model:
        """Draws a model, including companions; the parts in `given` replace drawn ones."""
        taken = _taken(self.inputs)
        variables = self.module.init(key, jnp.zeros(taken.shape, taken.dtype))
        # A backbone without parameters is also a part of the model.
        params, batch_stats = {"backbone": {}, **variables["params"]}, variables.get("batch_stats", {})
        params = heads_drawn(self.module.classifier_init, params, key)
        for number, (name, companion) in enumerate(self.companions.items(), start=1):
            model = companion.init(jax.random.fold_in(key, number))
            params = {**params, name: model.params}
            batch_stats = {**batch_stats, **({name: model.batch_stats} if model.batch_stats else {})}
        if self.given is not None:
            params, batch_stats = _overlaid(params, self.given.params), _overlaid(batch_stats, self.given.batch_stats)
        return Model(params, batch_stats)

    def predict(self, model: Model, inputs: jax.Array) -> Outputs:
        """The forward pass in evaluation mode: inputs [B, ...] to Outputs, each example independent of the others."""
        outputs: Any = self.module.apply(self._variables(model), self.inputs.to_network(inputs), train=False)
        return outputs

    def probabilities(self, model: Model, inputs: jax.Array) -> jax.Array:
        """The classifier's softmax in evaluation mode: float32 [B, C]."""
        return jax.nn.softmax(self.predict(model, inputs).logits)

    def embeddings(self, outputs: Outputs) -> jax.Array:
        """The vectors that represent images in pictures and predictions: float32 [B, D]."""
        return outputs.heads[self.embedding] if self.embedding else outputs.features

    def predict_rows(self, model: Model, inputs: jax.Array, rows: jax.Array, batch_size: int | None) -> Outputs:
        """`predict` for the examples at `rows` [n] of `inputs`, at most `batch_size` at a time, see `map_batches`."""
        return map_batches(lambda r: self.predict(model, inputs[r]), rows, batch_size)

    def train(
        self, model: Model, views: tuple[jax.Array, ...], mask: jax.Array
    ) -> tuple[tuple[Outputs, ...], BatchStats]:
        """The forward pass in training mode: several views of one batch, each with its own batch statistics.

        Views are [B, ...] each; they share convolution calls, not statistics. The mask, bool [B], is False for the
        padding of a short batch, which statistics exclude.

        Returns:
            One Outputs for each view, and the stored statistics after this batch (only 'running' changes them).
        """
        outputs, updated = self._apply_train(model, views, mask)
        return outputs, updated if self.normalisation == "running" else model.batch_stats

    def batch_statistics(self, model: Model, inputs: jax.Array, mask: jax.Array) -> BatchStats:
        """Statistics of this one batch under the 'static' policy: mean and unbiased variance of every layer's input."""
        return self._apply_train(model, (inputs,), mask)[1]

    def input_moments(self, model: Model, inputs: jax.Array, mask: jax.Array) -> BatchStats:
        """Moments, see `Normalisation`, of every layer's input in evaluation mode, means over the examples of a batch.

        The moments of companions are zeros, as are those of a batch without valid examples.
        """
        variables, taken = self._variables(model), self.inputs.to_network(inputs)
        _, found = self.module.apply(variables, taken, train=False, mutable=["moments"])
        share = jnp.where(mask, 1 / jnp.maximum(jnp.sum(mask), 1), 0)[:, None]
        of_batch = jax.tree.map(lambda leaf: jnp.sum(share * leaf, axis=0), found["moments"])
        return {**jax.tree.map(jnp.zeros_like, model.batch_stats), **of_batch}

    def pooled_statistics(self, model: Model, moments: BatchStats) -> BatchStats:
        """Statistics of all images, from the mean of their `input_moments`; companions keep their statistics."""
        return {**model.batch_stats, **pooled_statistics(model.batch_stats, without(moments, *self.companions))}

    def _apply_train(self, model, views, mask):
        inputs = self.inputs.to_network(self._together(views))
        of_views: dict[str, Any] = {"train": True, "mask": jnp.tile(mask, len(views)), "num_views": len(views)}
        outputs, updated = self.module.apply(self._variables(model), inputs, **of_views, mutable=["batch_stats"])
        size = len(mask)
        per_view = [jax.tree.map(lambda x, v=v: x[v * size : (v + 1) * size], outputs) for v in range(len(views))]
        return tuple(per_view), {**model.batch_stats, **updated.get("batch_stats", {})}

    def _together(self, views: Sequence[jax.Array]) -> jax.Array:
        """Views as one batch, float32 [V*B, ...]."""
        if hasattr(self.inputs, "together"):
            return self.inputs.together(views)
        return jnp.concatenate([view.astype(jnp.float32) for view in views])

    def _variables(self, model: Model) -> dict[str, Any]:
        """The model's variables for Flax, without those of companions."""
        return {kind: without(parts, *self.companions) for kind, parts in model._asdict().items()}


def _taken(inputs: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a backbone's input for one example, [1, ...]."""
    return jax.eval_shape(inputs.to_network, jax.ShapeDtypeStruct((1, *inputs.shape), jnp.float32))


def companion_model(model: Model, name: str) -> Model:
    """The companion's part of a model."""
    return Model(model.params[name], model.batch_stats.get(name, {}))


def with_companion_statistics(batch_stats: BatchStats, name: str, own: BatchStats) -> BatchStats:
    """The whole model's statistics, with those of a companion replaced; a companion may have none."""
    return {**batch_stats, name: own} if own else batch_stats


def _overlaid(fresh: Any, given: Any) -> Any:
    """Replaces fresh leaves by those of `given`; keeps the order of the entries."""
    if not isinstance(fresh, Mapping):
        return given
    return {name: _overlaid(entry, given[name]) if name in given else entry for name, entry in fresh.items()}


def build_network(
    config,
    facts: Mapping[str, Any],
    kind: Any,
    heads: Mapping[str, Callable[..., Any]] | None = None,
    embedding: str = "",
    companions: Mapping[str, Callable[..., Any]] = {},
    backbone: nn.Module | None = None,
) -> Network:
    """Builds the network that `config.model` names.

    Args:
        config: the configuration.
        facts: of the data set, see `fedjax_ssl.data.dataset_facts`: the number of classes, and what its kind needs.
        kind: of the inputs, see `fedjax_ssl.data.kinds.kind_of`.
        heads, embedding: the method's, see `build_model` and `Network`.
        companions: name -> function from the configuration to the heads of a companion, name -> factory, see `Heads`.
            A companion has the same backbone architecture and no classifier.
        backbone: replaces the backbone that `config.model` names; it has no batch statistics.

    Raises:
        UserError: a name is unknown, or a user's own backbone cannot be used.
    """
    section, inputs = config.model, kind.inputs(facts)
    module = build_model(section, facts["num_classes"], heads, kind.noun, getattr(inputs, "keywords", {}))
    if backbone is not None:
        module = module.clone(backbone=backbone)
    keeps = backbone is None and (
        not isinstance(module.backbone, Adapted)
        or check_backbone(section.name, module.backbone, _taken(inputs), section.normalisation)
    )
    # Without statistics there is nothing to recompute, send or average.
    normalisation = section.normalisation if keeps or section.normalisation == "none" else "group"
    network = Network(module, inputs, normalisation, embedding)
    # Flax modules hold no parameters: the networks can share the backbone's module, and each has its own parameters.
    others = {name: module.clone(classifies=False, heads=heads_of(config)) for name, heads_of in companions.items()}
    return network._replace(companions={name: network._replace(module=other) for name, other in others.items()})
