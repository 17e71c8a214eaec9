"""Losses, each a pure function of a batch: float32 [].

Logits are float32 [B, C]; `mask`, bool [B], is False for padding. Means are over the examples in the mask, and 0 if
there is none.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.ops.trees import add_up


def mean_present(values: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean over the examples in the mask: [B, ...] to [...]; 0 if there is none."""
    mask = mask.reshape(-1, *(1,) * (values.ndim - 1))
    return jnp.sum(jnp.where(mask, values, 0.0), axis=0) / jnp.maximum(jnp.sum(mask), 1)


def cross_entropy(logits: jax.Array, labels: jax.Array, mask: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Mean cross-entropy: sum_b w_b H(y_b, p_b) / (number of examples in the mask).

    Labels are int32 [B], weights w float32 or bool [B]; None: 1. With 1[confident] this is FixMatch's eq. 4, a mean
    over the whole batch.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(mask, labels, 0))
    losses = losses if weights is None else weights * losses
    return mean_present(losses, mask)


def soft_cross_entropy(logits: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of -sum_c q_c log p_c; the targets q are float32 [B, C], without gradient."""
    return mean_present(optax.softmax_cross_entropy(logits, jax.lax.stop_gradient(targets)), mask)


def mixup_cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    partner_labels: jax.Array,
    mixing: jax.Array,
    mask: jax.Array,
    weights: jax.Array | None = None,
) -> jax.Array:
    """lambda l(f(x_mix), y) + (1 - lambda) l(f(x_mix), y'): the mix loss, FedAnchor eq. 9 (SemiFL eq. 7).

    Labels y and y' are int32 [B], lambda is float32 [] (`mixing`), weights of mixtures are float32 [B]; None: 1.
    """
    first = cross_entropy(logits, labels, mask, weights)
    return mixing * first + (1 - mixing) * cross_entropy(logits, partner_labels, mask, weights)


def soft_label_loss(logits: jax.Array, targets: jax.Array, weights: jax.Array, mask: jax.Array) -> jax.Array:
    """1/B sum_b w_b KL(q_b || p_b) over the batch, UDA's consistency (Xie et al., 2020).

    p is the softmax of the strong views' logits. Targets q are float32 [B, C], weights are float32 [B].
    """
    entropies = jnp.sum(jax.scipy.special.xlogy(targets, targets), axis=-1)
    divergences = entropies - jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1)
    return mean_present(weights * divergences, mask)


def kl_divergence(reference_logits: jax.Array, logits: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of KL(p_0, p); p_0 is the reference's distribution, without gradient (FedIL eq. 12)."""
    reference = jax.nn.log_softmax(jax.lax.stop_gradient(reference_logits))
    return mean_present(optax.losses.kl_divergence_with_log_targets(jax.nn.log_softmax(logits), reference), mask)


def symmetric_divergence(p: jax.Array, q: jax.Array) -> jax.Array:
    """(KL(p || q) + KL(q || p)) / 2 of distributions without zeros, float32 [..., C]: float32 [...]."""
    return 0.5 * jnp.sum((p - q) * (jnp.log(p) - jnp.log(q)), axis=-1)


def proximal_term(params: Any, reference: Any) -> jax.Array:
    """1/2 |w - w_t|^2 over all leaves, the term of FedProx (Li et al., 2020, eq. 2) without its mu: float32 []."""
    squares = jax.tree.map(lambda leaf, other: jnp.sum(jnp.square(leaf - other)), params, reference)
    return 0.5 * add_up(jax.tree.leaves(squares))


def mean_square_distances(params: Any, reference: Any) -> jax.Array:
    """The sum over all leaves of mean((w - w')^2), so that each tensor weighs the same: float32 []."""
    means = jax.tree.map(lambda leaf, other: jnp.mean(jnp.square(leaf - other)), params, reference)
    return add_up(jax.tree.leaves(means))


def unit_vectors(vectors: jax.Array) -> jax.Array:
    """Each row divided by its length, in float32; a zero row stays zero and has a zero gradient."""
    squared = jnp.sum(jnp.square(vectors.astype(jnp.float32)), axis=-1, keepdims=True)
    positive = squared > 0
    return jnp.where(positive, vectors / jnp.sqrt(jnp.where(positive, squared, 1.0)), 0.0)


def negative_cosine(predictions: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    """-mean_b cos(p_b, z_b) of float32 [B, D] without a gradient for the targets z (BYOL, Grill et al., 2020)."""
    similarities = jnp.sum(unit_vectors(predictions) * unit_vectors(jax.lax.stop_gradient(targets)), axis=-1)
    return -mean_present(similarities, mask)


def label_contrastive_loss(
    embeddings: jax.Array, labels: jax.Array, mask: jax.Array, num_classes: int, temperature: float
) -> jax.Array:
    """The label contrastive loss of FedAnchor, eq. 1 and 2, on one batch of anchors.

        l(c) = -log( sum_{y(i) = y(j) = c} exp(s_ij / tau) / sum_{y(i) != y(j)} exp(s_ij / tau) )
        L_c  = 1/C sum_c l(c),     s_ij the cosine similarity of z_i and z_j

    A class without a pair in the batch is left out of the sum (its l(c) would contain log 0). If the batch has only one
    class, all classes are left out. The loss is not bounded below: it can be negative. The printed equation does not
    exclude i = j from the first sum; here it is excluded, because such a pair always has similarity 1. Embeddings, the
    anchor head's outputs z, are float32 [B, D], labels int32 [B].
    """
    z = unit_vectors(embeddings)
    exponents = jnp.matmul(z, z.T, precision="highest") / temperature
    both = mask[:, None] & mask[None, :]
    same = labels[:, None] == labels[None, :]
    positive = both & same & ~jnp.eye(len(labels), dtype=bool)
    negative = both & ~same
    one_hot = jax.nn.one_hot(labels, num_classes)

    def log_sums(pairs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """For each class: log sum exp(s / tau) over pairs whose first example has it (0 without any), and if any."""
        highest = jnp.max(jnp.where(pairs, exponents, -jnp.inf), axis=1)  # [B]
        highest = jnp.max(jnp.where(one_hot > 0, highest[:, None], -jnp.inf), axis=0)  # [C]
        some = highest > -jnp.inf
        # The largest of a class's exponents is subtracted from all, so that exp neither overflows nor gives only zeros.
        highest = jax.lax.stop_gradient(jnp.where(some, highest, 0.0))
        terms = jnp.exp(jnp.where(pairs, exponents - highest[labels][:, None], -jnp.inf))
        sums = jnp.matmul(jnp.sum(terms, axis=1), one_hot, precision="highest")
        return jnp.log(jnp.where(some, sums, 1.0)) + highest, some

    numerator, has_positive = log_sums(positive)
    denominator, has_negative = log_sums(negative)
    denominator = jax.nn.logsumexp(jnp.where(has_negative, denominator, jnp.finfo(jnp.float32).min))
    return jnp.sum(jnp.where(has_positive & jnp.any(has_negative), denominator - numerator, 0.0)) / num_classes


def common_direction_penalty(embeddings: jax.Array, mask: jax.Array) -> jax.Array:
    """|mean_b z_b/|z_b||^2, the squared length, in [0, 1], of the mean unit vector of embeddings, float32 [B, D].

    It is the mean cosine similarity over all pairs of the batch, including i = j. The label contrastive loss does not
    depend on it: a constant added to every similarity cancels in its quotient.
    """
    return jnp.sum(jnp.square(mean_present(unit_vectors(embeddings), mask)))


def info_nce(one: jax.Array, other: jax.Array, mask: jax.Array, temperature: float) -> jax.Array:
    """The mean over 2B views i of -log( exp(s_ij / tau) / sum_{k != i} exp(s_ik / tau) ).

    j is the other view of i's image, s the cosine similarity (SimCLR, Chen et al., ICML 2020, eq. 1). Projections of
    both views are float32 [B, D]. Padding is never a candidate. The loss is 0 for fewer than two images.
    """
    z, present = unit_vectors(jnp.concatenate([one, other])), jnp.tile(mask, 2)
    similarities = jnp.matmul(z, z.T, precision="highest") / temperature
    candidates = present[None, :] & ~jnp.eye(len(z), dtype=bool)
    # A finite number, so that a view without candidates has a zero gradient instead of NaN.
    logits = jnp.where(candidates, similarities, jnp.finfo(jnp.float32).min / 2)
    positives = jnp.sum(z * jnp.roll(z, len(one), axis=0), axis=-1) / temperature
    losses = jax.nn.logsumexp(logits, axis=-1) - positives
    return mean_present(losses, present)


def neighbourhood_loss(one: jax.Array, other: jax.Array, mask: jax.Array, replica: bool = False) -> jax.Array:
    """|Z Z^T - Z' Z'^T|_F^2 / B^2 of unit vectors: images that are near in one model should be near in the other.

    Features of both models are float32 [B, D] and [B, D']; B is the number of present images. With `replica` the
    divisor is B XOR 2 (a bug of Twin-sight's code); it is at least 1.
    """

    def gram(features):
        z = jnp.where(mask[:, None], unit_vectors(features), 0.0)
        return jnp.matmul(z, z.T, precision="highest")

    count = jnp.sum(mask)
    number = jnp.bitwise_xor(count, 2) if replica else jnp.square(count)
    return jnp.sum(jnp.square(gram(one) - gram(other))) / jnp.maximum(number, 1)


def information_loss(logits: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two parts of information maximisation: the mean entropy of the predictions, and the entropy of their mean.

    Their difference is small if every prediction is confident and all classes are predicted equally often (Krause,
    Perona and Gomes, "Discriminative Clustering by Regularized Information Maximization", NIPS 2010). In nats.
    """
    log_p = jax.nn.log_softmax(logits)
    p = jnp.exp(log_p)
    mean = mean_present(p, mask)
    of_mean = -jnp.sum(mean * jnp.log(jnp.maximum(mean, jnp.finfo(jnp.float32).tiny)))
    return mean_present(-jnp.sum(p * log_p, axis=-1), mask), of_mean
