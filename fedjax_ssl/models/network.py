"""A model as pure functions of stored inputs: forward passes, batch statistics."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_ssl.kinds import Inputs, kind_name, kind_of
from fedjax_ssl.learning.batches import map_batches
from fedjax_ssl.learning.sgd import BatchStats, Model
from fedjax_ssl.models import Outputs, build_model, check_backbone, heads_drawn, is_own
from fedjax_ssl.models.normalisation import pooled_statistics


class Network(NamedTuple):
    """A Flax model together with the kind of its inputs.

    A method may have a second network whose model travels, is averaged and saved with the first one's: a companion. Its
    numbers are entries of the same `Model`, under its name, so that it is one more part by name for all that trains,
    sends or counts parts. The passes below do not touch it; it has its own, `network.companions[name]`, which take
    `companion_model(model, name)`.
    """

    module: nn.Module  # the Flax module, a `Heads`
    inputs: Inputs  # what an example is, and how it becomes what the module takes
    # The batch normalisation policy, one of `POLICIES`; of a user's backbone that has no statistics 'group', or 'none'.
    normalisation: str
    embedding: str = ""  # name of the head that represents an image; '': the backbone's features do
    companions: Mapping[str, "Network"] = {}  # further networks by name
    # Parts of a model to begin with in place of fresh ones, see `init_from`; None: all are fresh.
    given: Model | None = None
    # Sums of normalisation statistics that clients sent, in place of those of their images, see
    # `fedjax_ssl.server.statistics`; None: the images are at hand.
    gathered: Any = None

    def init(self, key: jax.Array) -> Model:
        """A fresh model, companions included, but for the parts that are given."""
        taken = _taken(self.inputs)
        variables = self.module.init(key, jnp.zeros(taken.shape, taken.dtype))
        # A backbone without a parameter is a part of the model all the same.
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
        """Evaluation mode: inputs [B, ...] to Outputs, each example independent of the others."""
        outputs: Any = self.module.apply(self._variables(model), self.inputs.to_network(inputs), train=False)
        return outputs

    def probabilities(self, model: Model, inputs: jax.Array) -> jax.Array:
        """The classifier's softmax in evaluation mode: float32 [B, C]."""
        return jax.nn.softmax(self.predict(model, inputs).logits)

    def embeddings(self, outputs: Outputs) -> jax.Array:
        """What represents an image in pictures and predictions: float32 [B, D]."""
        return outputs.heads[self.embedding] if self.embedding else outputs.features

    def predict_rows(self, model: Model, inputs: jax.Array, rows: jax.Array, batch_size: int | None) -> Outputs:
        """`predict` for rows [n] of a table of inputs, at most `batch_size` of them at a time, see `map_batches`."""
        return map_batches(lambda r: self.predict(model, inputs[r]), rows, batch_size)

    def train(
        self, model: Model, views: tuple[jax.Array, ...], mask: jax.Array
    ) -> tuple[tuple[Outputs, ...], BatchStats]:
        """Training mode: several views of one batch in one pass, each with its own batch statistics.

        Args:
            model: in training.
            views: each [B, ...]. They share their convolutions, not their statistics.
            mask: bool [B]; False marks the padding of a short batch, which takes no part in any statistics.

        Returns:
            One Outputs a view, and the statistics after this batch (under 'static' they are unchanged).
        """
        outputs, updated = self._apply_train(model, views, mask)
        return outputs, updated if self.normalisation == "running" else model.batch_stats

    def batch_statistics(self, model: Model, inputs: jax.Array, mask: jax.Array) -> BatchStats:
        """The 'static' policy's statistics of this one batch: mean and unbiased variance of every layer's input."""
        return self._apply_train(model, (inputs,), mask)[1]

    def input_moments(self, model: Model, inputs: jax.Array, mask: jax.Array) -> BatchStats:
        """The mean over a batch of its examples' moments of every layer's input, in evaluation mode.

        See `Normalisation`. With the arguments of `batch_statistics`; of companions zeros, and so for a batch without
        an example.
        """
        variables, taken = self._variables(model), self.inputs.to_network(inputs)
        _, found = self.module.apply(variables, taken, train=False, mutable=["moments"])
        share = jnp.where(mask, 1 / jnp.maximum(jnp.sum(mask), 1), 0)[:, None]
        of_batch = jax.tree.map(lambda leaf: jnp.sum(share * leaf, axis=0), found["moments"])
        return {**jax.tree.map(jnp.zeros_like, model.batch_stats), **of_batch}

    def pooled_statistics(self, model: Model, moments: BatchStats) -> BatchStats:
        """The statistics of all images, from the mean over them of `input_moments`; companions keep theirs."""
        own = {name: part for name, part in moments.items() if name not in self.companions}
        return {**model.batch_stats, **pooled_statistics(model.batch_stats, own)}

    def _apply_train(self, model, views, mask):
        outputs, updated = self.module.apply(
            self._variables(model),
            self.inputs.to_network(self._together(views)),
            train=True,
            mask=jnp.tile(mask, len(views)),
            num_views=len(views),
            mutable=["batch_stats"],
        )
        size = len(mask)
        per_view = [jax.tree.map(lambda x, v=v: x[v * size : (v + 1) * size], outputs) for v in range(len(views))]
        return tuple(per_view), {**model.batch_stats, **updated.get("batch_stats", {})}

    def _together(self, views: Sequence[jax.Array]) -> jax.Array:
        """Views as one batch, float32 [V*B, ...]."""
        if hasattr(self.inputs, "together"):
            return self.inputs.together(views)
        return jnp.concatenate([view.astype(jnp.float32) for view in views])

    def _variables(self, model: Model) -> dict[str, Any]:
        """The model's numbers as Flax takes them, without its companions'."""
        return {
            kind: {name: part for name, part in parts.items() if name not in self.companions}
            for kind, parts in model._asdict().items()
        }


def _taken(inputs: Inputs) -> jax.ShapeDtypeStruct:
    """What a backbone takes of one example."""
    return jax.eval_shape(inputs.to_network, jax.ShapeDtypeStruct((1, *inputs.shape), jnp.float32))


def companion_model(model: Model, name: str) -> Model:
    """The model of a companion, out of the whole one."""
    return Model(model.params[name], model.batch_stats.get(name, {}))


def with_companion_statistics(batch_stats: BatchStats, name: str, own: BatchStats) -> BatchStats:
    """The whole model's statistics with those of a companion, which may have none."""
    return {**batch_stats, name: own} if own else batch_stats


def _overlaid(fresh: Any, given: Any) -> Any:
    """The leaves of `given` in the place of the fresh ones; the entries stay in the order in which they were made."""
    if not isinstance(fresh, Mapping):
        return given
    return {name: _overlaid(entry, given[name]) if name in given else entry for name, entry in fresh.items()}


def build_network(
    config,
    facts: Mapping[str, Any],
    heads: Mapping[str, Callable[..., Any]] | None = None,
    embedding: str = "",
    companions: Mapping[str, Callable[..., Any]] = {},
    backbone: nn.Module | None = None,
) -> Network:
    """The network that `config.model` names.

    Args:
        config: the configuration.
        facts: of the data set, see `fedjax_ssl.data.dataset_facts`; its classes are read, and what its kind reads.
        heads: those of the method, see `build_model`.
        embedding: the head that represents an image; '': the features.
        companions: name -> function of the configuration that gives the heads of a second network, name -> factory,
            see `Heads`. It has a backbone of the same kind and no classifier.
        backbone: in the place of the one that `config.model` names; it has no batch statistics.

    Raises:
        UserError: a name is unknown, or a user's own backbone cannot be used.
    """
    section, inputs = config.model, kind_of(facts).inputs(facts)
    module = build_model(section, facts["num_classes"], heads, kind_name(facts), getattr(inputs, "keywords", {}))
    if backbone is not None:
        module = module.clone(backbone=backbone)
    own = is_own(section.name)
    keeps = backbone is None and (
        not own or check_backbone(section.name, module.backbone, _taken(inputs), section.normalisation)
    )
    network = Network(
        module=module,
        inputs=inputs,
        # A backbone without statistics has none to recompute, send or average.
        normalisation=section.normalisation if keeps or section.normalisation == "none" else "group",
        embedding=embedding,
    )
    # Modules of Flax are descriptions: both networks may share one of the backbone, and each has its own numbers.
    others = {name: module.clone(classifies=False, heads=heads_of(config)) for name, heads_of in companions.items()}
    return network._replace(companions={name: network._replace(module=other) for name, other in others.items()})
