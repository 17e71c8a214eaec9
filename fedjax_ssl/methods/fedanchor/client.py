"""Scores by cosine similarity to labelled anchors (FedAnchor, section 4.2)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.ops.losses import unit_vectors


class ClassAnchors(NamedTuple):
    """C vectors, with which a client labels its images."""

    means: jax.Array  # float32 [C, D], mean of each class's unit vectors (not itself a unit vector)
    counts: jax.Array  # int32 [C], number of anchors of each class
    # float32 [D], the anchors' mean, subtracted from every embedding (of anchors and images) before it is normalised to
    # length 1. None: nothing is subtracted, as in the paper.
    centre: jax.Array | None = None


class AnchorEmbeddings(NamedTuple):
    """All S anchors."""

    embeddings: jax.Array  # float32 [S, D], the anchor head's outputs
    labels: jax.Array  # int32 [S]


def class_anchors(anchors: AnchorEmbeddings, num_classes: int, centred: bool = False) -> ClassAnchors:
    """Computes the class means for eq. 3; for `centred` see `ClassAnchors.centre`.

    The mean cosine similarity to a class is one product with the mean of its unit vectors: s_c(z) = z/|z| .
    mean_k(z_k/|z_k|). Normalising this mean to length 1 would change the scores, and so the share of examples above the
    threshold.
    """
    centre = jnp.mean(anchors.embeddings, axis=0) if centred else None
    one_hot = jax.nn.one_hot(anchors.labels, num_classes)  # [S, C]
    counts = jnp.sum(one_hot, axis=0)
    sums = jnp.matmul(one_hot.T, _directions(anchors.embeddings, centre), precision="highest")
    return ClassAnchors(sums / jnp.maximum(counts, 1)[:, None], counts.astype(jnp.int32), centre)


def class_mean_scores(embeddings: jax.Array, anchors: ClassAnchors) -> jax.Array:
    """Average cosine similarity to each class's anchors, FedAnchor eq. 3, as one [B, D] x [D, C] product.

    float32 [B, C] in [-1, 1]; -inf for a class without anchors, 0 for a zero embedding (or one at the centre).
    """
    scores = jnp.matmul(_directions(embeddings, anchors.centre), anchors.means.T, precision="highest")
    return jnp.where(anchors.counts > 0, scores, -jnp.inf)


def along_common_direction(embeddings: jax.Array, anchors: ClassAnchors) -> jax.Array:
    """Cosine of each embedding, float32 [B, D], with the common direction of the anchors: float32 [B].

    The common direction is that of the mean of the anchors' unit vectors; with centred class means that of the centre,
    because the client knows nothing else. The cosine is 0 on average if embeddings point in all directions. It is near
    1 if all are close to one line; then cosine similarities are large for every class.
    """
    mean = jnp.sum(anchors.means * anchors.counts[:, None], axis=0) if anchors.centre is None else anchors.centre
    return jnp.matmul(unit_vectors(embeddings), unit_vectors(mean[None])[0], precision="highest")


def _directions(embeddings: jax.Array, centre: jax.Array | None) -> jax.Array:
    """Unit vectors of embeddings [B, D], after subtracting the centre if there is one."""
    return unit_vectors(embeddings if centre is None else embeddings - centre)
