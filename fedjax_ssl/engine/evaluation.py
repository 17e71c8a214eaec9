"""Evaluates a round independently of the method: the model's accuracy, and pseudo-labels against the hidden labels."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.data.owners import UNKNOWN
from fedjax_ssl.engine.interface import Metrics, Problem, Report, checked_metrics, joined
from fedjax_ssl.engine.measures import count_training_images, knn_accuracy, macro_auc, measure, open_set
from fedjax_ssl.models.network import Network
from fedjax_ssl.ops.batches import map_batches
from fedjax_ssl.ops.losses import cross_entropy
from fedjax_ssl.ops.sgd import Model

RULE = "pseudo_label_accuracy_"  # prefix of the name of a labelling rule
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
    """Evaluates the classifier on a set of images, without augmentation.

    Args:
        network: the architecture.
        model: the global model.
        name: the set's name.
        images: uint8 [n, H, W, C].
        labels: int32 [n].
        batch_size: images in a batch; None: a number that is fast on the platform.
        more: further measures, (logits [n, C], labels) -> values by name.
        of_features: further measures of the backbone's features [n, F].

    Returns:
        `<name>_accuracy`, from 0 to 1; `<name>_loss`, the mean cross-entropy in nats; and the further measures, with
        `<name>_` before their names.
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


def measure_model(problem: Problem, model: Model, data: FederatedData, hidden_labels: jax.Array) -> Metrics:
    """Evaluates the model on the validation images, or on the test set if there are none."""
    name, images, labels = measured_images(data, hidden_labels)
    more = _measures(problem, model, data, hidden_labels), _measures_of_features(problem, model, data)
    measured = evaluate(problem.network, model, name, images, labels, problem.config.eval_batch_size, *more)
    if data.attackers is None or data.attackers.targets is None:
        return measured
    logits = problem.network.predict(model, data.inputs[data.attackers.targets]).logits
    return {**measured, "attack_success": jnp.mean(jnp.argmax(logits, axis=1) == problem.config.attack.to_class)}


def _measures(problem: Problem, model: Model, data: FederatedData, hidden_labels: jax.Array) -> Measure:
    """The function that computes further measures from logits.

    They are the measures of `config.eval_measures`, those of unknown images, and the success of an attack on a class.
    """
    attack = problem.config.attack
    names = problem.config.eval_measures
    counts = count_training_images(data, hidden_labels, problem.num_classes) if "shots" in names else None
    unknown = None
    if data.unknown_inputs is not None:
        rows, size = jnp.arange(len(data.unknown_inputs)), problem.config.eval_batch_size
        unknown = problem.network.predict_rows(model, data.unknown_inputs, rows, size).logits

    def measured(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        found = measure(names, logits, labels, counts)
        if unknown is not None:
            found |= open_set(logits, labels, unknown)
        if data.attackers is None or data.attackers.targets is None:
            return found
        attacked = labels == attack.from_class
        wrong = attacked & (jnp.argmax(logits, axis=1) == attack.to_class)
        return {**found, "attacked_class": jnp.sum(wrong) / jnp.sum(attacked)}

    return measured


def _measures_of_features(problem: Problem, model: Model, data: FederatedData) -> Measure | None:
    """The function that compares features with those of the server's labelled images; None if no measure needs it."""
    config, rows = problem.config, data.server_index
    if "knn" not in config.eval_measures:
        return None
    known = problem.network.predict_rows(model, data.inputs, rows, config.eval_batch_size).features

    def measured(features: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        classes = problem.num_classes
        shares = knn_accuracy(features, labels, known, data.visible_labels[rows], classes)
        return {"knn_accuracy": shares}

    return measured


def score_report(
    report: Report, clients: jax.Array, present: jax.Array, data: FederatedData, hidden_labels: jax.Array
) -> Metrics:
    """`score_pseudo_labels` for the rows of a cohort; rows that are not `present` have no examples."""
    rows, sizes = data.rows_of(clients), jnp.where(present, data.client_size[clients], 0)
    unlabelled = (data.visible_labels[rows] < 0) & (jnp.arange(rows.shape[1]) < sizes[:, None])
    truth, with_unknown = hidden_labels[rows], data.unknown_inputs is not None
    return score_pseudo_labels(report, truth, unlabelled, jnp.sum(present), with_unknown)


def score_pseudo_labels(
    report: Report, truth: jax.Array, unlabelled: jax.Array, num_jobs: jax.Array, with_unknown: bool = False
) -> dict[str, jax.Array]:
    """Compares a cohort's pseudo-labels with the true labels, over its unlabelled examples.

    Args:
        report: leaves [R, n_max]. Only the examples in `report.made` count.
        truth: int32 [R, n_max], the true labels. -1: the true label is not known, the example does not count in
            accuracies. `UNKNOWN`: an image of an unknown class, for which every label is wrong.
        unlabelled: bool [R, n_max], False for padding and for examples with a visible label.
        num_jobs: int32 [], number of rows that are not padding.
        with_unknown: whether clients hold unknown images.

    Returns:
        `pseudo_label_accuracy` of the labels in use; `pseudo_label_accuracy_<rule>` of each other rule;
        `qualified_accuracy` of the labels that clients train on (NaN if there are none); `qualified_per_client`, the
        mean number of these labels per client; `qualified_share`, their share of all unlabelled examples; the mean of
        each of the report's `facts` over the examples for which it is finite; with unknown images
        `qualified_unknown_share`, the share of them that clients train on.
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

    found = {
        "pseudo_label_accuracy": accuracy(report.labels, unlabelled),
        **{f"{RULE}{rule}": accuracy(labels, unlabelled) for rule, labels in report.others.items()},
        "qualified_accuracy": accuracy(report.labels, qualified),
        "qualified_per_client": jnp.sum(qualified) / jnp.maximum(num_jobs, 1),
        "qualified_share": jnp.sum(qualified) / jnp.maximum(jnp.sum(unlabelled), 1),
        **({"qualified_unknown_share": jnp.sum(qualified & unknown) / jnp.sum(unknown)} if with_unknown else {}),
    }
    return joined(found, checked_metrics({name: mean(fact) for name, fact in report.facts.items()}))


NUM_EMBEDDINGS = 1000  # what a picture of the latent space can show


def make_snapshot(
    network: Network, batch_size: int | None, with_auc: bool = False
) -> Callable[..., dict[str, jax.Array]]:
    """Makes the function that describes a model by its outputs on a set of images.

    Returns:
        snapshot(model, images [T, H, W, C], labels [T]) -> `predictions` and `labels`, int32 [T]; `loss`, the mean
        cross-entropy; `embeddings`, float32 [n, D], and `embedding_labels`, int32 [n], of at most `NUM_EMBEDDINGS`
        images, spread evenly over the set; and `auc` if `with_auc`, which cannot be computed from predictions.
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
