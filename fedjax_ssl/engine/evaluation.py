"""Evaluates a round independently of the method: the model's accuracy, and pseudo-labels against the hidden labels."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.data.owners import UNKNOWN
from fedjax_ssl.engine.interface import Metrics, Problem, Report, checked_metrics, joined
from fedjax_ssl.engine.measures import (
    OF_SCORES,
    accuracy_by_domain,
    count_training_images,
    knn_accuracy,
    macro_auc,
    measure,
    open_set,
)
from fedjax_ssl.models.network import Network
from fedjax_ssl.ops.batches import map_batches
from fedjax_ssl.ops.losses import cross_entropy
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import zeros_unless

RULE = "pseudo_label_accuracy_"  # prefix of the name of a labelling rule


def is_tested(config: Any, number: Any) -> Any:
    """Whether the model is tested after a round: the first, every `eval_every`-th and the last; `number` is from 1."""
    return (number % config.eval_every == 0) | (number == 1) | (number == config.num_rounds)


def measure_if_due(
    problem: Problem, model: Model, data: FederatedData, hidden_labels: jax.Array, number: jax.Array
) -> tuple[Metrics, dict[str, jax.Array]]:
    """`measure_model` after round `number`, without its cost if that round has no test, see `is_tested`.

    `number` must have no axis over seeds: with one, `jax.vmap` turns the condition into a choice between two results,
    and both are computed. Returns the figures, 0 without a test; and name -> whether the round lacks the figure, bool
    []; {} if no round does.
    """
    measure = functools.partial(measure_model, problem, model, data, hidden_labels)
    if problem.config.eval_every == 1:
        return measure(), {}
    is_due = is_tested(problem.config, number)
    measured = zeros_unless(is_due, measure)
    return measured, dict.fromkeys(measured, ~is_due)


def measure_model(problem: Problem, model: Model, data: FederatedData, hidden_labels: jax.Array) -> Metrics:
    """Evaluates a model without augmentation on the validation images, or on the test set if there are none.

    Returns:
        `SET_accuracy`, from 0 to 1, and of each of the data's domains `SET_accuracy_DOMAIN`; `SET_loss`, the mean
        cross-entropy in nats; with the same prefix the measures of `config.eval_measures`, with unknown images those of
        `open_set`, and with crafted images `attacked_class`, the share of `attack.from_class` that is taken for
        `attack.to_class`. And `attack_success`, the same share of the attackers' targets.
    """
    config, network, attack = problem.config, problem.network, problem.config.attack
    names, size, num_classes = config.eval_measures, config.eval_batch_size, problem.num_classes
    name, images, labels, rows = "test", data.test_inputs, data.test_labels, data.validation_index
    if len(rows):
        name, images, labels = "validation", data.inputs[rows], hidden_labels[rows]

    def describe(rows):
        outputs = network.predict(model, images[rows])
        return outputs.logits, (outputs.features if "knn" in names else ())

    logits, features = map_batches(describe, jnp.arange(len(images)), size)
    predicted = jnp.argmax(logits, axis=-1)
    counts = count_training_images(data, hidden_labels, num_classes) if "shots" in names else None
    found = {
        "accuracy": jnp.mean(predicted == labels),
        "loss": cross_entropy(logits, labels, jnp.ones(len(labels), bool)),
        **accuracy_by_domain(predicted == labels, data.domains),
        **measure(names, logits, labels, counts),
    }
    if "knn" in names:
        known = network.predict_rows(model, data.inputs, data.server_index, size).features
        of_known = data.visible_labels[data.server_index]
        found["knn_accuracy"] = knn_accuracy(features, labels, known, of_known, num_classes)
    if data.unknown_inputs is not None:
        of_all = jnp.arange(len(data.unknown_inputs))
        found |= open_set(logits, labels, network.predict_rows(model, data.unknown_inputs, of_all, size).logits)
    success = {}
    if data.attackers is not None and data.attackers.targets is not None:
        attacked = labels == attack.from_class
        found["attacked_class"] = jnp.sum(attacked & (predicted == attack.to_class)) / jnp.sum(attacked)
        of_targets = network.predict(model, data.inputs[data.attackers.targets]).logits
        success["attack_success"] = jnp.mean(jnp.argmax(of_targets, axis=1) == attack.to_class)
    return {**{f"{name}_{measured}": value for measured, value in found.items()}, **success}


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
    """Measures the labels of a report against the truth, int32 [R, n_max], by name.

    In the truth -1 stands for an unknown label, which does not count in accuracies, and `UNKNOWN` for an image of an
    unknown class, for which every label is wrong. `unlabelled`, bool [R, n_max], is False for padding and visible
    labels; `num_jobs` is the number of rows that are not padding.

    They are `pseudo_label_accuracy` of the labels in use; `pseudo_label_accuracy_<rule>` of each other rule;
    `qualified_accuracy` of the labels that clients train on (NaN if there are none); `qualified_per_client`, the mean
    number of these labels per client; `qualified_share`, their share of all unlabelled examples; the mean of each of
    the report's `facts` over the examples for which it is finite; and if clients hold unknown images
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
    network: Network, batch_size: int | None, measures: Iterable[str] = ()
) -> Callable[..., dict[str, jax.Array]]:
    """Makes the function that describes a model by its outputs: (model, inputs [T, ...], labels [T]) -> arrays by name.

    They are `predictions` and `labels`, int32 [T]; `loss`, the mean cross-entropy; `embeddings`, float32 [n, D], and
    `embedding_labels`, int32 [n], of at most `NUM_EMBEDDINGS` images, spread evenly over the set. And what some
    `measures` need that predictions do not give: `auc`; for `OF_SCORES` also `confidences`, float32 [T], and `ranks`,
    int32 [T], see `measure_outputs`.
    """

    def of_scores(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        ahead = logits > jnp.take_along_axis(logits, labels[:, None], axis=1)
        return {"confidences": jnp.max(jax.nn.softmax(logits), axis=1), "ranks": jnp.sum(ahead, axis=1)}

    def snapshot(model: Model, images: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        def describe(rows):
            outputs = network.predict(model, images[rows])
            return outputs.logits, network.embeddings(outputs)

        logits, embeddings = map_batches(describe, jnp.arange(len(images)), batch_size)
        shown = np.linspace(0, len(labels) - 1, min(len(labels), NUM_EMBEDDINGS)).astype(int)
        return {
            **({"auc": macro_auc(jax.nn.softmax(logits), labels)} if "auc" in measures else {}),
            **(of_scores(logits, labels) if set(measures) & set(OF_SCORES) else {}),
            "predictions": logits.argmax(axis=-1),
            "labels": labels,
            "loss": cross_entropy(logits, labels, jnp.ones(len(labels), bool)),
            "embeddings": embeddings[shown],
            "embedding_labels": labels[shown],
        }

    return snapshot
