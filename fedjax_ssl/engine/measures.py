"""Measures besides accuracy: balanced accuracy, precision, AUC, accuracy by class size; and kNN accuracy of features.

Pure functions with the semantics of scikit-learn, which can run inside a compiled round; and `measure_outputs` of
outputs on the host. A measure that is undefined for a set is NaN.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.ops.losses import unit_vectors

# Value of `eval_measures` -> the measures that it adds to the records (their names after the set's name), in words. All
# are from 0 to 1.
MEASURES = {
    "balanced_accuracy": {"balanced_accuracy": "balanced accuracy"},
    "precision": {"precision": "macro precision"},
    "auc": {"auc": "macro AUC"},
    "shots": {
        "many_accuracy": "many-shot accuracy",
        "medium_accuracy": "medium-shot accuracy",
        "few_accuracy": "few-shot accuracy",
    },
    "knn": {"knn_accuracy": "kNN accuracy"},
    "f1": {"f1": "macro F1"},
    "sensitivity": {"sensitivity": "sensitivity"},
    "specificity": {"specificity": "specificity"},
    "kappa": {"kappa": "Cohen's kappa"},
    "calibration": {"calibration_error": "calibration error"},
    "top5": {"top5_accuracy": "top-5 accuracy"},
}
OF_OUTPUTS = ("f1", "sensitivity", "specificity", "kappa", "calibration", "top5")  # of the last model, on the host
OF_SCORES = ("calibration", "top5")  # of these, those that predictions do not suffice for
BINS = 15  # of the calibration error
# Measures of runs with unknown classes, in addition to those of `eval_measures`.
OPEN_SET = {"auroc": "AUROC of unknown images", "open_accuracy": "open-set accuracy"}
KNN_TEMPERATURE = 0.1


def of_domains(names: Iterable[str]) -> dict[str, str]:
    """The accuracy on each domain of a set, as `words_of` has other measures: name -> in words."""
    return {f"accuracy_{name}": f"accuracy on {name}" for name in names}


def accuracy_by_domain(right: Any, domains: Mapping[str, Any]) -> dict[str, Any]:
    """The accuracy on each domain, from whether each example is right and whether it is of the domain, bool [n].

    The names are those of `of_domains`; NaN for a domain without examples.
    """
    return {f"accuracy_{name}": (right & of).sum() / of.sum() for name, of in domains.items()}


def words_of(measures: Iterable[str]) -> dict[str, str]:
    """What some measures add to the records: name, without the set's name -> the name in words."""
    return {name: words for measure in measures for name, words in MEASURES[measure].items()}


def measure(
    measures: Iterable[str], logits: jax.Array, labels: jax.Array, num_training: jax.Array
) -> dict[str, jax.Array]:
    """Measures of a set, by name (without the set's name), each from 0 to 1.

    Logits are [n, C], labels int32 [n]; `num_training`, int [C], the training images of each class, is read by 'shots'.
    Of the names, 'knn' (see `knn_accuracy`) and `OF_OUTPUTS` are ignored.
    """
    matrix = confusion_matrix(labels, jnp.argmax(logits, axis=1), logits.shape[1])
    found = measure_predictions(measures, matrix, num_training)
    return {**found, **({"auc": macro_auc(jax.nn.softmax(logits), labels)} if "auc" in measures else {})}


def measure_predictions(measures: Iterable[str], matrix: jax.Array, num_training: jax.Array) -> dict[str, jax.Array]:
    """Computes the measures that need only a confusion matrix, not 'auc' and 'knn'; arguments as in `measure`."""
    found = {}
    if "balanced_accuracy" in measures:
        found["balanced_accuracy"] = balanced_accuracy(matrix)
    if "precision" in measures:
        found["precision"] = macro_precision(matrix)
    if "shots" in measures:
        found |= by_shots(matrix, num_training)
    return found


def measure_outputs(
    labels: np.ndarray,
    predictions: np.ndarray,
    num_classes: int,
    confidences: np.ndarray | None = None,
    ranks: np.ndarray | None = None,
) -> dict[str, float]:
    """The measures `OF_OUTPUTS` of a model's outputs on n examples, on the host.

    With two classes sensitivity and specificity are of the second class, which counts as the positive one. With more
    they are means over the classes that occur, each against all others. `confidences`, float [n], are the largest
    probabilities; None: no calibration error. `ranks`, int [n], say how many classes are more probable than the true
    one; None: no top-5 accuracy.

    Source: scikit-learn's functions; the calibration error is that of Guo et al., "On Calibration of Modern Neural
    Networks", ICML 2017, the mean over 15 bins of equal width of |accuracy - mean confidence|, by their examples.
    """
    from sklearn import metrics

    occurring = np.unique(labels)
    classes = np.union1d(occurring, predictions)
    tables = metrics.multilabel_confusion_matrix(labels, predictions, labels=classes)[np.isin(classes, occurring)]
    if num_classes == 2:
        tables = tables[occurring == 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {
            "f1": metrics.f1_score(labels, predictions, average="macro", zero_division=0),
            "sensitivity": np.mean(tables[:, 1, 1] / tables[:, 1].sum(axis=1)) if len(tables) else np.nan,
            "specificity": np.mean(tables[:, 0, 0] / tables[:, 0].sum(axis=1)) if len(tables) else np.nan,
            "kappa": metrics.cohen_kappa_score(labels, predictions),
        }
    if confidences is not None:
        bins = np.minimum(np.ceil(confidences * BINS).astype(int) - 1, BINS - 1)
        apart = np.bincount(bins, (labels == predictions) - confidences.astype(float))
        found["calibration_error"] = np.abs(apart).sum() / len(labels)
    if ranks is not None:
        found["top5_accuracy"] = np.mean(ranks < 5)
    return {name: float(value) for name, value in found.items()}


def confusion_matrix(labels: ArrayLike, predictions: ArrayLike, num_classes: int) -> jax.Array:
    """int32 [C, C], the number of images of the row's class that were classified as the column's class."""
    return jnp.zeros((num_classes, num_classes), jnp.int32).at[labels, predictions].add(1)


def balanced_accuracy(matrix: jax.Array) -> jax.Array:
    """The mean recall over the classes that occur, as scikit-learn's `balanced_accuracy_score`."""
    images = jnp.sum(matrix, axis=1)
    return _mean(jnp.diag(matrix) / jnp.maximum(images, 1), images > 0)


def macro_precision(matrix: jax.Array) -> jax.Array:
    """The mean precision over classes, as scikit-learn's `precision_score` with average='macro' and zero_division=0.

    A class that occurs but is never predicted has precision 0. A class that neither occurs nor is predicted is left
    out.
    """
    images, predicted = jnp.sum(matrix, axis=1), jnp.sum(matrix, axis=0)
    return _mean(jnp.diag(matrix) / jnp.maximum(predicted, 1), images + predicted > 0)


FEW, MANY = 20, 100  # a class with fewer training images than the first has few, one with more than the second many


def by_shots(matrix: jax.Array, num_training: jax.Array) -> dict[str, jax.Array]:
    """Balanced accuracy of the classes with many, a medium number of, and few training images, whose number is int [C].

    Source: Liu et al., "Large-Scale Long-Tailed Recognition in an Open World", CVPR 2019.
    """
    images = jnp.sum(matrix, axis=1)
    right = jnp.diag(matrix) / jnp.maximum(images, 1)
    has_few, has_many = num_training < FEW, num_training > MANY
    groups = {"many": has_many, "medium": ~has_few & ~has_many, "few": has_few}
    return {f"{name}_accuracy": _mean(right, group & (images > 0)) for name, group in groups.items()}


def macro_auc(probabilities: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over classes of the area under the ROC curve of one class against all others, from scores [n, C].

    The area is the probability that an image of the class has a larger score for it than an image of another class;
    equal scores count half. A class with no image or with all images is left out.

    Source: scikit-learn's `roc_auc_score` with multi_class='ovr' and average='macro', which refuses absent classes.
    """
    areas = jax.lax.map(
        lambda c: roc_area(jnp.take(probabilities, c, axis=1), labels == c), jnp.arange(probabilities.shape[1])
    )
    return _mean(areas, jnp.isfinite(areas))


def roc_area(scores: jax.Array, is_one: jax.Array) -> jax.Array:
    """The area under the ROC curve of scores [n] for the positives `is_one`, bool [n]; NaN if all or none are."""
    order = jnp.argsort(scores)
    scores, is_one = scores[order], is_one[order]
    place = jnp.arange(len(scores))
    # For each place, the first and the last place with the same score.
    differs = scores[1:] != scores[:-1]
    first = jax.lax.cummax(jnp.where(jnp.append(True, differs), place, 0))
    last = jax.lax.cummin(jnp.where(jnp.append(differs, True), place, len(scores)), reverse=True)
    others = jnp.append(0, jnp.cumsum(~is_one))  # number of negatives before each place
    num_others = others[-1]
    # Integers until here: float32 cannot represent all sums of pairs.
    won = (others[first] + others[last + 1]) / jnp.maximum(2 * num_others, 1)
    area = _mean(won, is_one)
    return jnp.where(num_others > 0, area, jnp.nan)


def open_set(logits: jax.Array, labels: jax.Array, unknown: jax.Array) -> dict[str, jax.Array]:
    """How well the largest softmax probability tells a set's images from unknown images; logits are [n, C] and [m, C].

    An image counts as unknown if this probability is below a threshold: the largest one that keeps 95 % of the set.
    `auroc` is the area under the ROC curve of known against unknown images; `open_accuracy` the share of the n + m
    images that are right: known images not below the threshold with the right class, and unknown images below it.

    Source: Hendrycks and Gimpel, "A Baseline for Detecting Misclassified and Out-of-Distribution Examples in Neural
    Networks", ICLR 2017 (the score and the area); Liang et al., "Enhancing the Reliability of Out-of-distribution Image
    Detection in Neural Networks", ICLR 2018 (a threshold that keeps 95 %).
    """
    known_scores, unknown_scores = (jnp.max(jax.nn.softmax(each), axis=1) for each in (logits, unknown))
    threshold = jnp.sort(known_scores)[len(logits) // 20]  # a twentieth is below
    right = jnp.sum((jnp.argmax(logits, axis=1) == labels) & (known_scores >= threshold))
    is_known = jnp.arange(len(logits) + len(unknown)) < len(logits)
    return {
        "auroc": roc_area(jnp.concatenate([known_scores, unknown_scores]), is_known),
        "open_accuracy": (right + jnp.sum(unknown_scores < threshold)) / len(is_known),
    }


def knn_accuracy(
    features: jax.Array,
    labels: jax.Array,
    known: jax.Array,
    known_labels: jax.Array,
    num_classes: int,
    neighbours: int = 200,
) -> jax.Array:
    """The accuracy of a k-nearest-neighbour classifier on features, float32 [n, F], with cosine similarity.

    Each of the k nearest (at most S) of the known features, float32 [S, F], votes for its class with weight
    exp(cos / 0.1).

    Source: Wu et al., "Unsupervised Feature Learning via Non-Parametric Instance Discrimination", CVPR 2018.
    """
    similarities = jnp.matmul(unit_vectors(features), unit_vectors(known).T, precision="highest")
    nearest, places = jax.lax.top_k(similarities, min(neighbours, len(known)))
    votes = jnp.exp((nearest - 1) / KNN_TEMPERATURE)  # - 1, so that exp cannot overflow at any temperature
    by_class = jnp.sum(votes[..., None] * jax.nn.one_hot(known_labels[places], num_classes), axis=1)
    return jnp.mean(jnp.argmax(by_class, axis=1) == labels)


def count_training_images(data: FederatedData, hidden_labels: jax.Array, num_classes: int) -> jax.Array:
    """The number of images of each class that clients or server hold, each counted once: int32 [C]."""
    owned = data.at_clients("the measure 'shots'", "eval_measures without 'shots'").at[data.server_index].set(True)
    owned = owned & (hidden_labels >= 0)
    return jnp.zeros(num_classes, jnp.int32).at[hidden_labels].add(owned.astype(jnp.int32))


def _mean(values: Any, counted: jax.Array) -> jax.Array:
    """The mean of the counted values; NaN if there are none."""
    return jnp.sum(jnp.where(counted, values, 0.0)) / jnp.sum(counted)
