"""Scores by cosine similarity to labelled anchors (FedAnchor, section 4.2)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.learning.losses import unit_vectors


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
