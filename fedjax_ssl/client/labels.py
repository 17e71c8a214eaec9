"""Scores all images of a cohort in large batches, and makes pseudo-labels from the scores."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.client.confidence import Confidence, once_a_round, qualify
from fedjax_ssl.client.deck import Examples
from fedjax_ssl.client.steps import At
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Augmentation, Broadcast, Cohort, Label, Labels, Previous, Problem, Report
from fedjax_ssl.ops.batches import map_batches
from fedjax_ssl.ops.sgd import Model

LEAST_PRIOR = 1e-6  # the smallest prior of a class; a smaller one would make any probability the largest


# --- Scores. ----------------------------------------------------------------------------------------------------------


def score_cohort(
    problem: Problem, scores: Callable[[jax.Array], Any], images: jax.Array, examples: Examples, num_views: int = 0
) -> Any:
    """The scores of every example of a cohort by one model, leaves [M, n_max, ...], in batches of `eval_batch_size`.

    `scores` maps inputs [B, ...] to a pytree with leaves [B, ...], each example independent of the others. `images` is
    the image table. Scores are averaged over so many weak views (FedAnchor's ensemble, section 4.5); with 0 the raw
    images are scored.
    """
    rows, n_max = examples.rows, examples.rows.shape[1]

    def score_batch(example: jax.Array) -> Any:
        batch = images[rows.reshape(-1)[example]]
        if num_views == 0:
            return scores(batch)
        keys = examples.keys[example // n_max]
        views = [scores(weak_views(problem.weak, keys, example % n_max, batch, view)) for view in range(num_views)]
        return jax.tree.map(lambda *leaves: sum(leaves) / num_views, *views)

    scored = map_batches(score_batch, jnp.arange(rows.size), problem.config.eval_batch_size)
    return jax.tree.map(lambda leaf: leaf.reshape(*rows.shape, *leaf.shape[1:]), scored)


def weak_views(
    weak: Augmentation, keys: jax.Array, positions: jax.Array, images: jax.Array, view: int = 0
) -> jax.Array:
    """The weak views [B, ...] that `score_cohort` scores, by the jobs' keys and the examples' positions at a client."""

    def augment(key, position, image):
        key = jax.random.fold_in(jax.random.fold_in(key, position), view)
        return weak(key, image[None])[0]

    return jax.vmap(augment)(keys, positions, images)


def logits_of_each(
    problem: Problem, received: Model, own: Sequence[Model], images: jax.Array, examples: Examples
) -> list[jax.Array]:
    """Logits of every example of a cohort by the received model, then by each client's own model, leaves [M, ...].

    The result is float32 [M, n_max, C] for each model, in evaluation mode on raw images. Own models score one job after
    the other. With several devices all of them are sent to each device, which scores its share of a job's images.
    """

    def logits(model: Model, batch: jax.Array) -> jax.Array:
        return problem.network.predict(model, batch).logits

    def of_job(job: tuple[Model, jax.Array]) -> jax.Array:
        model, rows = job
        return map_batches(lambda batch: logits(model, images[batch]), rows, problem.config.eval_batch_size)

    of_received = score_cohort(problem, functools.partial(logits, received), images, examples)
    return [of_received, *(jax.lax.map(of_job, (models, examples.rows)) for models in own)]


# --- Debiasing by a client's prior (FedDB, Zhu et al., IJCAI 2024, arXiv 2405.19789). ---------------------------------


def mean_prediction(probabilities: jax.Array, present: jax.Array) -> jax.Array:
    """P_k(c), the mean of p(c | x), float32 [..., n, C], over the images that are present, bool [..., n]; else 0."""
    total = jnp.sum(jnp.where(present[..., None], probabilities, 0.0), axis=-2)
    return total / jnp.maximum(jnp.sum(present, axis=-1, keepdims=True), 1)


def without_prior(kind: str, logits: jax.Array, present: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """A model's logits of each client's images, float32 [..., n, C], debiased if asked for; and P_k, or None if not.

    `kind` is `config.confidence.debias`. P_k, float32 [..., C], is the mean prediction over the images that are
    present, bool [..., n].
    """
    if kind == "none":
        return logits, None
    prior = mean_prediction(jax.nn.softmax(logits), present)
    return debiased(logits, prior[..., None, :]), prior


def debiased(logits: jax.Array, prior: jax.Array | None) -> jax.Array:
    """Logits of p'(c | x) = (p(c | x) / P_k(c)) / sum_j p(j | x) / P_k(j), float32 [..., C]; unchanged without a prior.

    The division removes a model's preference for the client's frequent classes. P_k is at least `LEAST_PRIOR`.
    """
    if prior is None:
        return logits
    return logits - jnp.log(jnp.maximum(prior, LEAST_PRIOR))


# --- Labels. ----------------------------------------------------------------------------------------------------------


def label_cohort(
    problem: Problem, model: Model, data: FederatedData, examples: Examples, confidence: Confidence, num_views: int = 0
) -> Labels:
    """Labels every example of a cohort by one model in evaluation mode, see `label_by_scores` and `score_cohort`."""
    return label_by_scores(problem, told_scores(problem, model, data, examples, num_views), examples, confidence)


def label_by_scores(problem: Problem, scores: jax.Array, examples: Examples, confidence: Confidence) -> Labels:
    """Labels every example with the class of its largest score, float32 [M, n_max, C]; the rule decides which count.

    With `confidence.debias` scores must be probabilities, and are divided by the client's prior. `Labels.more` is each
    image's largest score, float32 [M, n_max].
    """
    prior = None
    if problem.config.confidence.debias != "none":
        prior = mean_prediction(scores, examples.present)
        scores = jax.nn.softmax(debiased(jnp.log(scores), prior[..., None, :]))
    states, weights, own = once_a_round(problem, confidence, scores, examples)
    labels = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    best, second = jnp.moveaxis(jax.lax.top_k(scores, 2)[0], -1, 0)
    report, size = Report(labels, weights > 0, {}, {"score_gap": best - second}), jnp.sum(examples.present, axis=1)
    return Labels(report, own, {}, weights, states, size, prior, best)


def told_scores(
    problem: Problem, model: Model, data: FederatedData, examples: Examples, num_views: int = 0
) -> jax.Array:
    """A model's probabilities of every example of a cohort, float32 [M, n_max, C], as clients label by them."""
    scores = functools.partial(problem.network.probabilities, model)
    return as_told(data, examples.rows, score_cohort(problem, scores, data.inputs, examples, num_views))


def as_told(data: FederatedData, rows: jax.Array, scores: jax.Array) -> jax.Array:
    """The scores [..., C] from which a client labels these rows, int32 [...]; an attacker shifts them by a class."""
    if data.attackers is None or data.attackers.mislabelled is None:
        return scores
    return jnp.where(data.attackers.mislabelled[rows][..., None], jnp.roll(scores, 1, axis=-1), scores)


def labelling_logits(at: At, logits: jax.Array, rows: jax.Array) -> jax.Array:
    """The logits from which a step makes labels: without gradient, as an attacker tells them, debiased; [B, C]."""
    return debiased(as_told(at.data, rows, jax.lax.stop_gradient(logits)), at.labels.prior)


def labels_of_received(problem: Problem, rule: Confidence, include_labelled: bool = False) -> Label:
    """The labelling of a method that makes labels in each step and updates its rule once a round.

    The received model labels all images, with `include_labelled` also those with labels. This gives the rule's states,
    and the report.
    """
    num_views = int(problem.config.confidence.debias != "none")  # APP-U uses weak views

    def label(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Labels:
        examples = Examples.of(data, cohort)
        included = examples._replace(present=examples.present if include_labelled else examples.unlabelled)
        made = label_cohort(problem, received.model, data, included, rule, num_views)
        return made._replace(report=made.report._replace(qualified=made.report.qualified | examples.labelled), more=())

    return label


def labels_for_report(problem: Problem, threshold: float) -> Label:
    """The labelling of a method that makes labels in each step by a fixed threshold: only the report of it."""

    def label(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Labels:
        examples = Examples.of(data, cohort)
        scores = functools.partial(problem.network.probabilities, received.model)
        labels, confident = qualify(score_cohort(problem, scores, data.inputs, examples), threshold, strictly=False)
        return Labels(Report(labels, (confident & examples.present) | examples.labelled))

    return label
