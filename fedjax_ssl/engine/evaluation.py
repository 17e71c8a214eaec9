"""Measuring a round from outside the method: the model's accuracy, and pseudo-labels against the hidden truth."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.data.unknown import UNKNOWN
from fedjax_ssl.engine.interface import Report
from fedjax_ssl.engine.measures import macro_auc
from fedjax_ssl.learning.batches import map_batches
from fedjax_ssl.learning.losses import cross_entropy
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.models.network import Network

RULE = "pseudo_label_accuracy_"  # followed by the name of a rule of labelling
# (logits or features [n, ...], labels int32 [n]) -> measures, by name.
Measure = Callable[[jax.Array, jax.Array], dict[str, jax.Array]]


def measured_images(data: FederatedData, hidden_labels: jax.Array) -> tuple[str, jax.Array, jax.Array]:
    """The set on which each round is measured: the validation images if there are any, else the test set.

    Returns:
        Its name, 'validation' or 'test'; its images, uint8 [n, H, W, C]; and their labels, int32 [n].
    """
    rows = data.validation_index
    if len(rows):
        return "validation", data.inputs[rows], hidden_labels[rows]
    return "test", data.test_inputs, data.test_labels


def evaluate(
    network: Network,
    model: Model,
    name: str,
    images: jax.Array,
    labels: jax.Array,
    batch_size: int | None,
    more: Measure | None = None,
    of_features: Measure | None = None,
) -> dict[str, jax.Array]:
    """How good the classification head is on a set of images, without augmentation.

    Args:
        network: the architecture.
        model: the global model.
        name: of the set.
        images: uint8 [n, H, W, C].
        labels: int32 [n].
        batch_size: images at a time; None: what is fast on the backend.
        more: what else is measured, (logits [n, C], labels) -> by name.
        of_features: the same of the backbone's features [n, F].

    Returns:
        `<name>_accuracy`, a share, and `<name>_loss`, the mean cross-entropy in nats; and what the others give, with
        the set's name before their names.
    """

    def describe(rows):
        outputs = network.predict(model, images[rows])
        return outputs.logits, (outputs.features if of_features else ())

    outputs, features = map_batches(describe, jnp.arange(len(images)), batch_size)
    others = {**(more(outputs, labels) if more else {}), **(of_features(features, labels) if of_features else {})}
    return {
        f"{name}_accuracy": jnp.mean(jnp.argmax(outputs, axis=-1) == labels),
        f"{name}_loss": cross_entropy(outputs, labels, jnp.ones(len(labels), bool)),
        **{f"{name}_{measured}": value for measured, value in others.items()},
    }


def score_pseudo_labels(
    report: Report, truth: jax.Array, unlabelled: jax.Array, num_jobs: jax.Array, with_unknown: bool = False
) -> dict[str, jax.Array]:
    """How many of a cohort's pseudo-labels are right, over its unlabelled examples.

    Args:
        report: leaves [R, n_max].
        truth: int32 [R, n_max], the true labels. -1: unknown to everybody, not counted. `UNKNOWN`: an image of an
            unknown class, for which every label is wrong.
        unlabelled: bool [R, n_max], False for padding and where the label is visible. Only examples that the report
            says were labelled are counted.
        num_jobs: int32 [], how many of the rows are not padding.
        with_unknown: whether clients hold unknown images.

    Returns:
        `pseudo_label_accuracy` of the labels in use; `pseudo_label_accuracy_<rule>` of each other rule;
        `qualified_accuracy` of the labels that clients train on (NaN without any); `qualified_per_client`, the mean
        number of these over the cohort; `qualified_share`, their share of all examples; the mean of each of the
        report's facts over the examples where it is finite; with unknown images `qualified_unknown_share`, the share of
        unknown images that clients train on.
    """
    unknown = unlabelled & (truth == UNKNOWN)
    if report.made is not None:
        unlabelled = unlabelled & report.made
    qualified = report.qualified & unlabelled

    def accuracy(labels: jax.Array, counted: jax.Array) -> jax.Array:
        counted = counted & (truth != -1)
        return jnp.sum((labels == truth) & counted) / jnp.sum(counted)

    def mean(fact: jax.Array) -> jax.Array:
        counted = unlabelled & jnp.isfinite(fact)
        return jnp.sum(jnp.where(counted, fact, 0.0)) / jnp.sum(counted)

    return {
        "pseudo_label_accuracy": accuracy(report.labels, unlabelled),
        **{f"{RULE}{rule}": accuracy(labels, unlabelled) for rule, labels in report.others.items()},
        "qualified_accuracy": accuracy(report.labels, qualified),
        "qualified_per_client": jnp.sum(qualified) / jnp.maximum(num_jobs, 1),
        "qualified_share": jnp.sum(qualified) / jnp.maximum(jnp.sum(unlabelled), 1),
        **{name: mean(fact) for name, fact in report.facts.items()},
        **({"qualified_unknown_share": jnp.sum(qualified & unknown) / jnp.sum(unknown)} if with_unknown else {}),
    }


NUM_EMBEDDINGS = 1000  # as many as a picture of the latent space can show


def make_snapshot(
    network: Network, batch_size: int | None, with_auc: bool = False
) -> Callable[..., dict[str, jax.Array]]:
    """The function that describes a model by its outputs on a set of images.

    Returns:
        snapshot(model, images [T, H, W, C], labels [T]) -> `predictions` and `labels`, int32 [T]; `loss`, the mean
        cross-entropy; `embeddings`, float32 [n, D], and `embedding_labels`, int32 [n], of at most `NUM_EMBEDDINGS`
        images, spread evenly over the set; and `auc` if `with_auc`, for which predictions are not enough.
    """

    def snapshot(model: Model, images: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        def describe(rows):
            outputs = network.predict(model, images[rows])
            return outputs.logits, network.embeddings(outputs)

        logits, embeddings = map_batches(describe, jnp.arange(len(images)), batch_size)
        shown = np.linspace(0, len(labels) - 1, min(len(labels), NUM_EMBEDDINGS)).astype(int)
        return {
            **({"auc": macro_auc(jax.nn.softmax(logits), labels)} if with_auc else {}),
            "predictions": logits.argmax(axis=-1),
            "labels": labels,
            "loss": cross_entropy(logits, labels, jnp.ones(len(labels), bool)),
            "embeddings": embeddings[shown],
            "embedding_labels": labels[shown],
        }

    return snapshot
