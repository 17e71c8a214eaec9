"""Scores all images of a cohort in large batches, and makes pseudo-labels from the scores."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.client.confidence import Confidence, once_a_round, qualify
from fedjax_ssl.client.deck import Examples
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Augmentation, Problem, Report
from fedjax_ssl.learning.batches import map_batches
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.models import Outputs

LEAST_PRIOR = 1e-6  # the smallest prior of a class; a smaller one would make any probability the largest


# --- Scores. ----------------------------------------------------------------------------------------------------------


def score_cohort(
    problem: Problem, scores: Callable[[jax.Array], Any], images: jax.Array, examples: Examples, num_views: int = 0
) -> Any:
    """Scores every example of a cohort by one model, in large batches.

    Args:
        problem: the run's `Problem`; a batch has `eval_batch_size` images.
        scores: images [B, H, W, C] -> a pytree with leaves [B, ...], each image independent of the others.
        images: uint8 [N, H, W, C], the image table.
        examples: the cohort's examples.
        num_views: scores are averaged over this many weak views (FedAnchor's ensemble, section 4.5); 0: the raw images
            are scored.

    Returns:
        The scores, leaves [M, n_max, ...].
    """
    rows, keys = examples.rows, examples.keys
    num_jobs, n_max = rows.shape

    def weak_view(view: int, example: jax.Array, batch: jax.Array) -> jax.Array:
        return weak_views(problem.weak, keys[example // n_max], example % n_max, batch, view)

    def score_batch(example: jax.Array) -> Any:
        batch = images[rows.reshape(-1)[example]]
        if num_views == 0:
            return scores(batch)
        views = [scores(weak_view(view, example, batch)) for view in range(num_views)]
        return jax.tree.map(lambda *leaves: sum(leaves) / num_views, *views)

    scored = map_batches(score_batch, jnp.arange(num_jobs * n_max), problem.config.eval_batch_size)
    return jax.tree.map(lambda leaf: leaf.reshape(num_jobs, n_max, *leaf.shape[1:]), scored)


def weak_views(
    weak: Augmentation, keys: jax.Array, positions: jax.Array, images: jax.Array, view: int = 0
) -> jax.Array:
    """The weak views that `score_cohort` scored for some examples, so that a client can train on exactly these views.

    Args:
        weak: the augmentation.
        keys: [B], the key of each example's job, from `Examples`.
        positions: int32 [B], indices among the client's examples.
        images: uint8 [B, H, W, C].
        view: number of the view.

    Returns:
        [B, H, W, C].
    """

    def augment(key, position, image):
        key = jax.random.fold_in(jax.random.fold_in(key, position), view)
        return weak(key, image[None])[0]

    return jax.vmap(augment)(keys, positions, images)


def score_by_own_models(
    scores: Callable[[Model, jax.Array], Any],
    models: Model,
    images: jax.Array,
    rows: jax.Array,
    batch_size: int | None,
) -> Any:
    """Scores every example of a cohort by its job's own model, one job after the other.

    With several devices all models are sent to each device, and each device scores its share of a job's images.

    Args:
        scores: (model, images [B, H, W, C]) -> a pytree with leaves [B, ...], each image independent of the others.
        models: leaves [M, ...].
        images: uint8 [N, H, W, C], the image table.
        rows: int32 [M, n_max], rows of the image table.
        batch_size: images in a batch, see `map_batches`.

    Returns:
        The scores, leaves [M, n_max, ...].
    """

    def score_job(job):
        model, of_job = job
        return map_batches(lambda batch: scores(model, images[batch]), of_job, batch_size)

    return jax.lax.map(score_job, (models, rows))


def logits_of_each(
    problem: Problem, received: Model, own: Sequence[Model], images: jax.Array, examples: Examples
) -> list[jax.Array]:
    """Logits of every example of a cohort, first by the received model, then by the clients' own models.

    Args:
        problem: the run's `Problem`.
        received: one model for all clients.
        own: the clients' own models, leaves [M, ...].
        images: uint8 [N, H, W, C], the image table.
        examples: the cohort's examples.

    Returns:
        For each model float32 [M, n_max, C], in evaluation mode on raw images.
    """

    def logits(model: Model, batch: jax.Array) -> jax.Array:
        return problem.network.predict(model, batch).logits

    of_received = score_cohort(problem, functools.partial(logits, received), images, examples)
    size = problem.config.eval_batch_size
    return [of_received, *(score_by_own_models(logits, models, images, examples.rows, size) for models in own)]


# --- Debiasing by a client's prior (FedDB, Zhu et al., IJCAI 2024, arXiv 2405.19789). ---------------------------------


def mean_prediction(probabilities: jax.Array, present: jax.Array) -> jax.Array:
    """P_k(c), the mean of p(c | x) over a client's images.

    Args:
        probabilities: float32 [..., n, C].
        present: bool [..., n].

    Returns:
        float32 [..., C]; 0 for a client without images.
    """
    total = jnp.sum(jnp.where(present[..., None], probabilities, 0.0), axis=-2)
    return total / jnp.maximum(jnp.sum(present, axis=-1, keepdims=True), 1)


def without_prior(kind: str, logits: jax.Array, present: jax.Array) -> jax.Array:
    """A model's logits of each client's images, debiased if `kind` is 'app_u', see `debiased`.

    Args:
        kind: `config.confidence.debias`, 'none' or 'app_u'.
        logits: float32 [..., n, C].
        present: bool [..., n], the images over which the mean prediction is taken.

    Returns:
        float32 [..., n, C].
    """
    prior = prior_of(kind, logits, present)
    return logits if prior is None else debiased(logits, prior[..., None, :])


def prior_of(kind: str, logits: jax.Array, present: jax.Array) -> jax.Array | None:
    """P_k of each client, see `mean_prediction`; None if the kind of debiasing is 'none'."""
    if kind == "none":
        return None
    return mean_prediction(jax.nn.softmax(logits), present)


def debiased(logits: jax.Array, prior: jax.Array | None) -> jax.Array:
    """Logits of p'(c | x) = (p(c | x) / P_k(c)) / sum_j p(j | x) / P_k(j).

    A client's model prefers the client's frequent classes. The division removes this preference from the labels.

    Args:
        logits: float32 [..., C], of p.
        prior: float32 [..., C], P_k, bounded below by `LEAST_PRIOR`; None: the logits are returned unchanged.
    """
    if prior is None:
        return logits
    return logits - jnp.log(jnp.maximum(prior, LEAST_PRIOR))


# --- Labels. ----------------------------------------------------------------------------------------------------------


class Labelled(NamedTuple):
    """The pseudo-labels of a cohort."""

    report: Report  # the labels, whether each counts, and labels of other rules; leaves [M, n_max]
    own: Mapping[str, Any] = {}  # entries of the clients' memory that the rule updated, leaves [M, ...]
    weights: jax.Array | None = None  # float32 [M, n_max], images' weights in the loss; None: 1 if qualified, else 0
    confidence: Any = ()  # the states of the rule after these labels, leaves [M, ...], see `Confidence`
    # float32 [M, C], the prior by which the client's probabilities are divided, see `debiased`; None: no division.
    prior: jax.Array | None = None
    largest: jax.Array | None = None  # float32 [M, n_max], each image's largest score; None if there are no scores


def label_cohort(
    problem: Problem,
    model: Model,
    data: FederatedData,
    examples: Examples,
    confidence: Confidence,
    num_views: int = 0,
) -> Labelled:
    """Labels every example of a cohort by a model in evaluation mode, see `label_by_scores`.

    Args:
        problem: the run's `Problem`.
        model: one for all clients.
        data: the federation's data.
        examples: the cohort's examples.
        confidence: the rule, from `make_confidence`.
        num_views: see `score_cohort`.
    """
    scores = functools.partial(problem.network.probabilities, model)
    scored = score_cohort(problem, scores, data.inputs, examples, num_views)
    return label_by_scores(problem, as_told(data, examples.rows, scored), examples, confidence)


def label_by_scores(problem: Problem, scores: jax.Array, examples: Examples, confidence: Confidence) -> Labelled:
    """Labels every example with the class of its largest score; the rule decides which labels count.

    The scores are float32 [M, n_max, C]. With `confidence.debias` they must be probabilities, and are divided by the
    client's prior.
    """
    prior = None
    if problem.config.confidence.debias != "none":
        prior = mean_prediction(scores, examples.present)
        scores = jax.nn.softmax(debiased(jnp.log(scores), prior[..., None, :]))
    states, weights, own = once_a_round(problem, confidence, scores, examples)
    labels = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    best, second = jnp.moveaxis(jax.lax.top_k(scores, 2)[0], -1, 0)
    return Labelled(Report(labels, weights > 0, {}, {"score_gap": best - second}), own, weights, states, prior, best)


def as_told(data: FederatedData, rows: jax.Array, scores: jax.Array) -> jax.Array:
    """The scores from which a client makes labels; an attacker with false labels shifts them to the next class.

    Args:
        data: the federation's data.
        rows: int32 [...], rows of the image table.
        scores: [..., C], scores of these images, in any unit.
    """
    if data.mislabelled is None:
        return scores
    return jnp.where(data.mislabelled[rows][..., None], jnp.roll(scores, 1, axis=-1), scores)


def told_outputs(data: FederatedData, rows: jax.Array, outputs: Outputs, heads: tuple[str, ...]) -> Outputs:
    """`as_told` for the logits of the classifier and of the named heads."""
    false = {name: as_told(data, rows, outputs.heads[name]) for name in heads}
    return outputs._replace(logits=as_told(data, rows, outputs.logits), heads={**outputs.heads, **false})


def states_and_report(
    problem: Problem, model: Model, data: FederatedData, examples: Examples, included: jax.Array, confidence: Confidence
) -> Labelled:
    """Labels a cohort once, for a method that makes labels in each step: gives the rule's states and a report.

    Args:
        problem: the run's `Problem`.
        model: the received model, which labels in evaluation mode.
        data: the federation's data.
        examples: the cohort's examples.
        included: bool [M, n_max], the examples that get pseudo-labels.
        confidence: the rule.

    Returns:
        The Labelled. In its report examples with a visible label are qualified, too.
    """
    num_views = int(problem.config.confidence.debias != "none")  # APP-U uses weak views
    made = label_cohort(problem, model, data, examples._replace(present=included), confidence, num_views)
    return made._replace(report=made.report._replace(qualified=made.report.qualified | examples.labelled))


def label_for_report(
    problem: Problem, model: Model, data: FederatedData, examples: Examples, threshold: float
) -> Report:
    """The report of `states_and_report`, for a method with a fixed threshold, which needs no states."""
    scores = score_cohort(problem, lambda images: problem.network.probabilities(model, images), data.inputs, examples)
    labels, confident = qualify(scores, threshold, strictly=False)
    return Report(labels, (confident & examples.present) | examples.labelled)
