"""Trainers: they make the targets for strong views of a client's images, labels with weights, batch by batch.

`self_training.py` has the phase. A trainer's state changes with every batch and never leaves the client.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.client.confidence import Confidence
from fedjax_ssl.client.deck import Batch
from fedjax_ssl.learning.losses import cross_entropy
from fedjax_ssl.learning.trees import add_up
from fedjax_ssl.models import Outputs


class Seen(NamedTuple):
    """What a trainer sees of a batch."""

    outputs: Outputs  # outputs of the labelling model for the weak views, [B, ...]; no gradient
    batch: Batch  # the batch of the step
    size: jax.Array  # int32 [], number of the client's unlabelled images
    # float32 [C], class shares of all labelled images; None unless `Trainer.needs_prior`.
    prior: jax.Array | None = None

    @property
    def probabilities(self) -> jax.Array:
        """float32 [B, C], the classifier's softmax."""
        return jax.nn.softmax(self.outputs.logits)


class Target(NamedTuple):
    """The targets of one classifier for the strong views."""

    labels: jax.Array  # int32 [B]
    weights: jax.Array  # float32 [B], from 0 to 1; 0 for padding


class Trainer(NamedTuple):
    """How clients train without labels: `by_confidence`, or ACR."""

    init: Callable[[int], Any]  # n_max -> the initial state of a client
    # (state, `Seen`) -> (a `Target` for the classifier and for each of `heads`; the state after the batch).
    targets: Callable[[Any, Seen], tuple[tuple[Target, ...], Any]]
    # (state after the batch, the classifier's logits of the strong views [B, C], their weights [B]) -> float32 [], an
    # additional loss; None: no additional loss.
    further: Callable[[Any, jax.Array, jax.Array], jax.Array] | None = None
    # State -> state at the beginning of a client's next round; None: `confidence.memory` decides.
    next_round: Callable[[Any], Any] | None = None
    begin: Callable[[Any, jax.Array], Any] | None = None  # as in `Confidence`
    heads: tuple[str, ...] = ()  # heads of the model that are trained besides the classifier
    strong_views: int = 1  # number of strong views of each image; the loss is their mean
    needs_prior: bool = False  # whether the server must send the class shares of the labelled images


def by_confidence(rule: Confidence) -> Trainer:
    """The trainer that labels with the classifier's most probable class, weighted by a rule."""

    def targets(state: Any, seen: Seen) -> tuple[tuple[Target, ...], Any]:
        batch, probabilities = seen.batch, seen.probabilities
        weights, after = rule.step(state, probabilities, batch.mask, batch.positions, seen.size)
        labels = jnp.argmax(seen.outputs.logits, axis=-1).astype(jnp.int32)
        return (Target(labels, weights),), after

    return Trainer(rule.init, targets, rule.regulariser, begin=rule.begin)


def pseudo_label_loss(
    trainer: Trainer, targets: Sequence[Target], state: Any, views: Sequence[Outputs], mask: jax.Array
) -> jax.Array:
    """The mean over views of the cross-entropy to the targets, plus the trainer's additional loss: float32 [].

    Args:
        trainer: has the heads and the additional loss.
        targets, state: what `Trainer.targets` returned for the batch.
        views: outputs of the strong views.
        mask: bool [B], False for padding.
    """
    losses = [
        cross_entropy(logits, labels, mask, weights)
        for view in views
        for logits, (labels, weights) in zip([view.logits, *(view.heads[h] for h in trainer.heads)], targets)
    ]
    value = add_up(losses) / len(views)
    return value if trainer.further is None else value + trainer.further(state, views[0].logits, targets[0].weights)
