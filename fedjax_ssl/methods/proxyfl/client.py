"""ICPL, ProxyFL's additional loss: every unlabelled image is pulled to the proxies of its candidate classes."""

import jax
import jax.numpy as jnp

from fedjax_ssl.client import At, Confidence, Loss, Views
from fedjax_ssl.engine import Problem
from fedjax_ssl.learning.losses import unit_vectors
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.learning.trees import add_up

FEATURES, PROXIES = "feature_projection", "proxy_projection"  # the heads P_f and P_w
COUNTS = "class_counts"  # metadata of uploads: how many images of each class a client has labelled or trusts


def contrastive_loss(
    problem: Problem,
    confidence: Confidence,
    model: Model,
    known: Views,
    images: Views,
    at: At,
    labels: jax.Array,
    weights_of_labels: jax.Array,
) -> Loss:
    """ICPL: pulls every image to the proxies of its candidate classes, and away from images that share none of them.

    The only candidate of a confident image is its label; those of other images are the classes more likely than in the
    prior.
    """
    options, num_classes, prior = problem.config.proxyfl, problem.num_classes, at.received.extra
    counts, p = weights_of_labels > 0, jax.nn.softmax(images.by_received)

    def candidates(p, labels, counts):  # xi_i
        return jnp.where(counts[:, None], jax.nn.one_hot(labels, num_classes) > 0, p > prior)

    xi = candidates(p, labels, counts)
    weights = p if options.weights_from == "received" else jax.nn.softmax(images.by_local)
    weights = jnp.where(counts[:, None], 1.0, weights) * xi
    of_labelled = jax.nn.one_hot(known.labels, num_classes)
    labelled_xi = of_labelled > 0
    if options.labelled_sets == "received":
        q = jax.nn.softmax(known.by_received)
        of_known, weights_of_known = confidence.label(at.work.confidence, q, at.work.deck.size)
        labelled_xi = candidates(q, of_known, weights_of_known > 0)
    # Both views of an image have the same candidates; labelled images are only negatives.
    sets, mask = jnp.concatenate([xi, xi, labelled_xi]), jnp.concatenate([images.mask, images.mask, known.mask])
    pulls, number = jnp.concatenate([weights, weights, jnp.zeros_like(of_labelled)]), len(images.mask)
    told = jnp.concatenate([
        jax.nn.one_hot(labels, num_classes) * (counts & images.mask)[:, None],
        of_labelled * known.mask[:, None],
    ])  # fmt: skip

    z = unit_vectors(jnp.concatenate([view.heads[FEATURES] for view in (images.weak, images.strong, known.weak)]))
    omega = model.params["classifier"]["kernel"].T
    v = unit_vectors(jnp.matmul(omega, model.params[PROXIES]["kernel"], precision="highest"))
    positives = jnp.sum(z * jnp.matmul(pulls, v, precision="highest"), axis=-1)
    losses = disjoint_sets_losses(z, positives, sets, mask, options.least_similarity)[: 2 * number]
    usable = (mask & jnp.any(sets, axis=1))[: 2 * number]
    sure = jnp.tile(counts, 2)
    groups = [usable] if options.contrastive_over == "all" else [usable & sure, usable & ~sure]
    value = add_up(jnp.sum(jnp.where(group, losses, 0.0)) / jnp.maximum(jnp.sum(group), 1) for group in groups)
    last_epoch = at.step >= at.work.num_steps - at.work.num_steps // problem.config.client.epochs
    sums = {COUNTS: jnp.where(last_epoch, jnp.sum(told, axis=0), 0.0)}
    return Loss(options.contrastive_weight * value, (), {"contrastive_loss": value}, sums=sums)


def disjoint_sets_losses(
    vectors: jax.Array, positives: jax.Array, sets: jax.Array, present: jax.Array, least: float = -1.0
) -> jax.Array:
    """Each example's contrastive loss against the examples that share no candidate class with it (ICPL of ProxyFL).

        l_i = -log( exp(s_i) / (exp(s_i) + sum_{j in R_i} exp(z_i . z_j)) ),    R_i = {j : xi_j and xi_i disjoint}

    Args:
        vectors: float32 [B, D], unit vectors z.
        positives: float32 [B], s_i, the similarity to the example's positive.
        sets: bool [B, C], xi, each example's candidate classes; an example with an empty set is never a negative.
        present: bool [B], False for padding.
        least: pairs with a lower similarity are not negatives.

    Returns:
        float32 [B]; undefined for absent examples and empty sets.
    """
    similarities = jnp.matmul(vectors, vectors.T, precision="highest")
    shared = jnp.matmul(sets.astype(jnp.float32), sets.T.astype(jnp.float32)) > 0
    usable = present & jnp.any(sets, axis=1)
    negative = ~shared & usable[None, :] & (similarities >= least)
    logits = jnp.concatenate([positives[:, None], jnp.where(negative, similarities, -jnp.inf)], axis=1)
    return jax.nn.logsumexp(logits, axis=1) - positives
