"""FedOpenMatch: Towards Semi-Supervised Federated Learning in Open-Set Environments.

ICLR 2026. For clients that also hold images of classes that the model does not know. What differs from FedAvg with
FixMatch:
  1. a second head has a one-vs-all classifier for each class: sigmoid(z_c) is its probability that an image is of class
     c. It is trained wherever labels are, with the hardest of the other classes as the negative class;
  2. a pseudo-label counts if it is confident and its one-vs-all classifier agrees: sigmoid(z) of its class is at least
     `fedopenmatch.inlier`;
  3. no gradient of this head reaches the backbone;
  4. on unlabelled images, clients minimise the difference of its logits between both views, and the entropy of its
     predictions.

The paper's text was not available: 2 to 4 follow its abstract; 1, the entropy in 4 and the weights are OpenMatch's
(Saito et al., NeurIPS 2021, arXiv 2105.14148). docs/methods/fedopenmatch.md says what is inferred.
"""

import jax
import jax.numpy as jnp

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.fields import Section, share
from fedjax_ssl.client import (
    At,
    Batches,
    Confidence,
    Examples,
    Loss,
    labels_of_received,
    make_confidence,
    passes,
    score_cohort,
    threshold_of,
    total,
)
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import CLASSIFIER, Broadcast, Cohort, Label, Labels, Method, Previous, Problem
from fedjax_ssl.methods.entry import LABELS_AT, Entry
from fedjax_ssl.methods.frames import on_both_kinds
from fedjax_ssl.models import Outputs
from fedjax_ssl.ops.losses import cross_entropy, mean_present
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.server.training import ServerLoss, ServerLossResult

ONE_VS_ALL = "one_vs_all"  # the head
PARTS = (*CLASSIFIER, ONE_VS_ALL)
# Weights of the one-vs-all probabilities' entropy, and of the squared difference of both views' one-vs-all logits.
ENTROPY_WEIGHT, CONSISTENCY_WEIGHT = 0.1, 0.5  # OpenMatch's


def defaults() -> Section:
    section = Section()
    section.inlier = share(0.5)  # a label also counts only if its one-vs-all probability reaches this
    return section


def fedopenmatch(problem: Problem) -> Method:
    """FedOpenMatch as a Method."""
    options = problem.config.fedopenmatch
    rule = make_confidence(problem, threshold_of(problem))
    if problem.config.confidence.labels_from == "received":
        raise UserError("confidence.labels_from='received' is not for fedopenmatch, whose label is the local model's")

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        """FixMatch among inliers, and the losses of the one-vs-all head."""
        seen, known, mask = passes(problem, model, batch, at), batch.labelled, batch.unlabelled.mask
        labels, weights = rule.label(at.labels, jax.nn.softmax(seen.scores))
        # A label does not count if its one-vs-all classifier disagrees.
        weights = jnp.where(agrees(seen.weak.heads[ONE_VS_ALL], labels, options.inlier), weights, 0.0)
        pseudo_loss = cross_entropy(seen.strong.logits, labels, mask, weights)

        weak, strong = one_vs_all(model, seen.weak), one_vs_all(model, seen.strong)
        uncertain = (binary_entropy(weak, mask) + binary_entropy(strong, mask)) / 2
        apart = mean_present(jnp.mean(jnp.square(weak - strong), axis=-1), mask)
        of_labelled = one_vs_all_loss(one_vs_all(model, seen.labelled), known.labels, known.mask) if known else 0.0
        of_head = of_labelled + ENTROPY_WEIGHT * uncertain + CONSISTENCY_WEIGHT * apart
        result = total(problem, batch, seen, pseudo_loss, weights, of_head)
        return result._replace(metrics={**result.metrics, "one_vs_all_loss": of_head})

    label = labels_of_inliers(problem, rule)
    return on_both_kinds(problem, loss, rule, parts=PARTS, label=label, server_loss=server_loss)


def labels_of_inliers(problem: Problem, rule: Confidence) -> Label:
    """The received model's labels; they count only if its one-vs-all classifier agrees."""
    network, least = problem.network, problem.config.fedopenmatch.inlier
    of_received = labels_of_received(problem, rule, problem.config.consistency.include_labelled)

    def label(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Labels:
        made, examples = of_received(received, data, cohort, previous), Examples.of(data, cohort)
        logits = score_cohort(
            problem, lambda images: network.predict(received.model, images).heads[ONE_VS_ALL], data.inputs, examples
        )
        counts = agrees(logits, made.report.labels, least) | examples.labelled
        return made._replace(report=made.report._replace(qualified=made.report.qualified & counts))

    return label


def server_loss(problem: Problem, data: FederatedData) -> ServerLoss:
    """Cross-entropy of the classifier plus the one-vs-all loss, on an augmented view of labelled images."""
    augment = {"strong": problem.strong, "weak": problem.weak}[problem.config.server.augmentation]

    def loss_fn(model: Model, rows: jax.Array, labels: jax.Array, mask: jax.Array, key: jax.Array) -> ServerLossResult:
        (outputs,), batch_stats = problem.network.train(model, (augment(key, data.inputs[rows]),), mask)
        loss = cross_entropy(outputs.logits, labels, mask)
        of_head = one_vs_all_loss(one_vs_all(model, outputs), labels, mask)
        return loss + of_head, (batch_stats, {"server_loss": loss, "server_one_vs_all_loss": of_head})

    return loss_fn


# --- The head. --------------------------------------------------------------------------------------------------------


def one_vs_all(model: Model, outputs: Outputs) -> jax.Array:
    """The head's logits z, float32 [B, C], without a gradient to the features."""
    head = model.params[ONE_VS_ALL]
    return jax.lax.stop_gradient(outputs.features) @ head["kernel"] + head.get("bias", 0.0)


def agrees(logits: jax.Array, labels: jax.Array, least: float) -> jax.Array:
    """Whether sigmoid(z) of each label is at least `least`: logits [..., C], labels int32 [...] -> bool [...]."""
    return jax.nn.sigmoid(jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]) >= least


def one_vs_all_loss(logits: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean of -log sigmoid(z_y) + max_{c != y} -log(1 - sigmoid(z_c)) over the mask (OpenMatch, eq. 1)."""
    is_label = jnp.arange(logits.shape[-1]) == labels[:, None]
    positive = jnp.sum(jnp.where(is_label, jax.nn.softplus(-logits), 0.0), axis=-1)
    return mean_present(positive + jnp.max(jnp.where(is_label, 0.0, jax.nn.softplus(logits)), axis=-1), mask)


def binary_entropy(logits: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean over images and classes of the entropy of (s, 1 - s), s = sigmoid(z) (OpenMatch, eq. 2)."""
    s = jax.nn.sigmoid(logits)
    return mean_present(jnp.mean(s * jax.nn.softplus(-logits) + (1 - s) * jax.nn.softplus(logits), axis=-1), mask)


ENTRY = Entry(
    fedopenmatch,
    title="FedOpenMatch",
    paper="https://openreview.net/forum?id=5UrPAW3uI1",
    settings=LABELS_AT,
    defaults=defaults,
    heads={ONE_VS_ALL: lambda model: None},
    tiny={"confidence.threshold": 0.2, "fedopenmatch.inlier": 0.3},
)
