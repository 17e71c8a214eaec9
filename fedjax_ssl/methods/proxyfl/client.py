"""ICPL, ProxyFL's additional loss: every unlabelled image is pulled to the proxies of its candidate classes."""

import jax
import jax.numpy as jnp

from fedjax_ssl.client import At, Batches, Confidence
from fedjax_ssl.client.passes import Passed
from fedjax_ssl.engine import Problem
from fedjax_ssl.ops.losses import unit_vectors
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import add_up

FEATURES, PROXIES = "feature_projection", "proxy_projection"  # the heads P_f and P_w
COUNTS = "class_counts"  # metadata of uploads: how many images of each class a client has labelled or trusts


def contrastive_loss(
    problem: Problem,
    rule: Confidence,
    model: Model,
    batch: Batches,
    seen: Passed,
    at: At,
    labels: jax.Array,
    weights_of_labels: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """ICPL: pulls every image to the proxies of its candidate classes, and away from images that share none of them.

    The only candidate of a confident image is its label; those of other images are the classes more likely than in the
    prior.

    Args:
        problem, model, batch, at: of the step.
        rule: which labels count.
        seen: what the network made of the batch.
        labels, weights_of_labels: int32 and float32 [B], the labels of the unlabelled images.

    Returns:
        The loss, float32 []; and the counts of labels by class that the client reports, float32 [C], 0 before its last
        epoch.
    """
    options, num_classes, prior = problem.config.proxyfl, problem.num_classes, at.received.extra
    mask, counts, p = batch.unlabelled.mask, weights_of_labels > 0, jax.nn.softmax(seen.by_received)

    def candidates(p, labels, counts):  # xi_i
        return jnp.where(counts[:, None], jax.nn.one_hot(labels, num_classes) > 0, p > prior)

    xi = candidates(p, labels, counts)
    weights = p if options.weights_from == "received" else jax.nn.softmax(seen.by_local)
    weights = jnp.where(counts[:, None], 1.0, weights) * xi
    # Both views of an image have the same candidates; labelled images are only negatives.
    sets, masks, pulls = [xi, xi], [mask, mask], [weights, weights]
    views = [seen.weak, seen.strong]
    told = [jax.nn.one_hot(labels, num_classes) * (counts & mask)[:, None]]
    if batch.labelled:
        of_labelled = jax.nn.one_hot(batch.labelled.labels, num_classes)
        labelled_xi = of_labelled > 0
        if options.labelled_sets == "received":
            q = jax.nn.softmax(seen.labelled_by_received)
            of_known, weights_of_known = rule.label(at.labels, q)
            labelled_xi = candidates(q, of_known, weights_of_known > 0)
        sets, masks, pulls = [*sets, labelled_xi], [*masks, batch.labelled.mask], [*pulls, jnp.zeros_like(of_labelled)]
        views.append(seen.labelled)
        told.append(of_labelled * batch.labelled.mask[:, None])
    of_sets, present, number = jnp.concatenate(sets), jnp.concatenate(masks), len(mask)

    z = unit_vectors(jnp.concatenate([view.heads[FEATURES] for view in views]))
    omega = model.params["classifier"]["kernel"].T
    v = unit_vectors(jnp.matmul(omega, model.params[PROXIES]["kernel"], precision="highest"))
    positives = jnp.sum(z * jnp.matmul(jnp.concatenate(pulls), v, precision="highest"), axis=-1)
    losses = disjoint_sets_losses(z, positives, of_sets, present, options.least_similarity)[: 2 * number]
    usable = (present & jnp.any(of_sets, axis=1))[: 2 * number]
    sure = jnp.tile(counts, 2)
    groups = [usable] if options.contrastive_over == "all" else [usable & sure, usable & ~sure]
    value = add_up(jnp.sum(jnp.where(group, losses, 0.0)) / jnp.maximum(jnp.sum(group), 1) for group in groups)
    last_epoch = at.step >= at.num_steps - at.num_steps // problem.config.client.epochs
    return value, jnp.where(last_epoch, jnp.sum(jnp.concatenate(told), axis=0), 0.0)


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
