"""What models say of all images of a cohort, in large batches: the received model, or one of each client's own."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.client.deck import Examples
from fedjax_ssl.engine.interface import Augmentation, Problem
from fedjax_ssl.learning.batches import map_batches
from fedjax_ssl.learning.sgd import Model


def score_cohort(
    problem: Problem, scores: Callable[[jax.Array], Any], images: jax.Array, examples: Examples, num_views: int = 0
) -> Any:
    """Scores of every example of a cohort, in large batches with shared weights.

    Args:
        problem: the run; `eval_batch_size` images are scored at a time.
        scores: images [B, H, W, C] -> a pytree with leaves [B, ...], each image independent of the others.
        images: uint8 [N, H, W, C], the flat table.
        examples: of the cohort.
        num_views: 0 scores the raw images; otherwise the mean over so many weakly augmented views (the ensemble of
            FedAnchor, section 4.5).

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
    """The weak views on which `score_cohort` scored some examples, so that a client can train on the very same.

    Args:
        weak: the augmentation.
        keys: [B], of each example's job, those of `Examples`.
        positions: int32 [B], among the client's examples.
        images: uint8 [B, H, W, C].
        view: its number.

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
    """Scores of every example of a cohort by a model of each job's own, one job after the other.

    On several devices all models come to all of them, and each scores its share of a job's images.

    Args:
        scores: (model, images [B, H, W, C]) -> a pytree with leaves [B, ...], each image independent of the others.
        models: leaves [M, ...].
        images: uint8 [N, H, W, C], the flat table.
        rows: int32 [M, n_max], of the image table.
        batch_size: images at a time, see `map_batches`.

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
    """Logits of every example of a cohort by the received model, then by models of the clients' own.

    Args:
        problem: the run.
        received: one model for all.
        own: each has leaves [M, ...].
        images: uint8 [N, H, W, C], the flat table.
        examples: of the cohort.

    Returns:
        float32 [M, n_max, C] of each model, in evaluation mode on raw images.
    """

    def logits(model: Model, batch: jax.Array) -> jax.Array:
        return problem.network.predict(model, batch).logits

    of_received = score_cohort(problem, functools.partial(logits, received), images, examples)
    size = problem.config.eval_batch_size
    return [of_received, *(score_by_own_models(logits, models, images, examples.rows, size) for models in own)]
