"""Scores of unlabelled examples: cosine similarity to labelled anchors (FedAnchor, section 4.2), or any other."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Cohort
from fedjax_ssl.learning.batches import map_batches


class CohortExamples(NamedTuple):
    """A cohort's own examples, for labelling in large batches.

    Attributes:
        rows: int32 [M, n_max], of the image table.
        there: bool [M, n_max], False beyond a client's size.
        keys: [M], the clients' own: what they draw does not depend on who else is in the cohort.
        states: the clients' own, leaves [M, ...].
    """

    rows: jax.Array
    there: jax.Array
    keys: jax.Array
    states: dict[str, Any]

    @classmethod
    def of(cls, data: FederatedData, cohort: Cohort, keys: jax.Array) -> "CohortExamples":
        """The examples of the cohort's clients."""
        rows, sizes = data.client_index[cohort.clients], data.client_size[cohort.clients]
        return cls(rows, jnp.arange(rows.shape[1]) < sizes[:, None], keys, cohort.states)


def score_cohort(
    scores: Callable,
    images: jax.Array,
    examples: CohortExamples,
    *,
    batch_size: int,
    weak: Callable,
    num_views: int = 0,
) -> Any:
    """Scores of every example of a cohort, in large batches with shared weights.

    Args:
        scores: images [B, H, W, C] -> a pytree with leaves [B, ...], each image on its own.
        images: uint8 [N, H, W, C], the flat table.
        examples: of the cohort.
        batch_size: images at a time.
        weak: the weak augmentation, (key, images) -> images.
        num_views: 0 scores the raw images; otherwise the mean over so many weakly augmented views (the ensemble of
            FedAnchor, section 4.5).

    Returns:
        The scores, leaves [M, n_max, ...].
    """
    rows, keys = examples.rows, examples.keys
    num_jobs, n_max = rows.shape

    def weak_view(view: int, example: jax.Array, batch: jax.Array) -> jax.Array:
        def augment(example, image):
            client_key = jax.random.fold_in(keys[example // n_max], example % n_max)
            return weak(jax.random.fold_in(client_key, view), image[None])[0]

        return jax.vmap(augment)(example, batch)

    def score_batch(example: jax.Array) -> Any:
        batch = images[rows.reshape(-1)[example]]
        if num_views == 0:
            return scores(batch)
        views = [scores(weak_view(view, example, batch)) for view in range(num_views)]
        return jax.tree.map(lambda *leaves: sum(leaves) / num_views, *views)

    found = map_batches(score_batch, jnp.arange(num_jobs * n_max), batch_size)
    return jax.tree.map(lambda leaf: leaf.reshape(num_jobs, n_max, *leaf.shape[1:]), found)
