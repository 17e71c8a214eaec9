"""Scores of unlabelled examples: cosine similarity to labelled anchors (FedAnchor, section 4.2), or any other."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.batches import map_batches
from fedjax_ssl.clients import Cohort
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.losses import unit_vectors


class ClassAnchors(NamedTuple):
    """What travels to the clients when classes travel: C vectors.

    Attributes:
        means: float32 [C, D], the mean over each class of the anchors' unit vectors (itself NOT a unit vector).
        counts: int32 [C], the anchors of each class.
    """

    means: jax.Array
    counts: jax.Array


class AnchorEmbeddings(NamedTuple):
    """What travels to the clients when every anchor travels, as in the paper: S vectors.

    Attributes:
        embeddings: float32 [S, D], the anchor head's outputs.
        labels: int32 [S].
    """

    embeddings: jax.Array
    labels: jax.Array


def class_anchors(anchors: AnchorEmbeddings, num_classes: int) -> ClassAnchors:
    """Sums eq. 3 up on the server.

    The mean over a class of cosine similarities is one product with the mean of its unit vectors:
    s_c(z) = z/|z| . mean_k(z_k/|z_k|). Scaling that mean to length 1 would change the scores, and with them
    the share of examples above the threshold.
    """
    one_hot = jax.nn.one_hot(anchors.labels, num_classes)  # [S, C]
    counts = jnp.sum(one_hot, axis=0)
    sums = jnp.matmul(one_hot.T, unit_vectors(anchors.embeddings), precision="highest")
    return ClassAnchors(sums / jnp.maximum(counts, 1)[:, None], counts.astype(jnp.int32))


def class_mean_scores(embeddings: jax.Array, anchors: ClassAnchors) -> jax.Array:
    """Average cosine similarity to each class's anchors, FedAnchor eq. 3, as one [B, D] x [D, C] product.

    Args:
        embeddings: float32 [B, D].
        anchors: the class anchors.

    Returns:
        float32 [B, C] in [-1, 1]; -inf for a class without anchors, 0 for an embedding that is zero.
    """
    scores = jnp.matmul(unit_vectors(embeddings), anchors.means.T, precision="highest")
    return jnp.where(anchors.counts > 0, scores, -jnp.inf)


def all_pairs_scores(embeddings: jax.Array, anchors: AnchorEmbeddings, num_classes: int) -> jax.Array:
    """The same scores as printed in FedAnchor eq. 3: every similarity first, then the mean over each class.

    Args:
        embeddings: float32 [B, D].
        anchors: every anchor's embedding and label.
        num_classes: C.

    Returns:
        float32 [B, C], equal to `class_mean_scores` up to rounding.
    """
    similarities = jnp.matmul(
        unit_vectors(embeddings), unit_vectors(anchors.embeddings).T, precision="highest"
    )  # [B, S]
    one_hot = jax.nn.one_hot(anchors.labels, num_classes)
    counts = jnp.sum(one_hot, axis=0)
    scores = jnp.matmul(similarities, one_hot, precision="highest") / jnp.maximum(counts, 1)
    return jnp.where(counts > 0, scores, -jnp.inf)


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
