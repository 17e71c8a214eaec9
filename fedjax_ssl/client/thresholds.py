"""Which pseudo-labels count: fixed thresholds, and those that adapt to a client or to a class.

A method ranks classes by scores, the larger the surer: probabilities (SemiFL, FixMatch) or cosines (FedAnchor). A
client computes its thresholds from its own examples when it labels them, once a round; nothing of it travels.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.engine.interface import Problem

KINDS = ("fixed", "share", "client_mean", "sat", "flexmatch", "freematch")
MEMORY = "threshold"  # the entry of 'freematch' in a client's memory


def own_thresholds(problem: Problem) -> dict[str, Any]:
    """The rule's entry of `State.clients`, every leaf [K, ...]; {} for all rules but 'freematch'."""
    if problem.config.threshold.kind != "freematch":
        return {}
    num_clients = problem.config.num_clients
    return {
        MEMORY: {
            "level": jnp.zeros(num_clients),
            "by_class": jnp.zeros((num_clients, problem.num_classes)),
            "rounds": jnp.zeros(num_clients, jnp.int32),
        }
    }


def class_thresholds(
    options, base: float, scores: jax.Array, present: jax.Array, own: dict[str, Any]
) -> tuple[jax.Array, dict[str, Any]]:
    """One client's threshold for each class.

        fixed        T_c = t
        share        T_c halfway between its k-th and its next largest score, k = share * n to the nearest whole number:
                     k of its examples count, whatever their scores
        client_mean  T_c = tau,                     tau the mean over the client's examples of the largest score
        sat          T_c = tau p_c / max_c p_c,     p_c the mean over its examples of the score of class c
                     (self-adaptive thresholding of FreeMatch, for each client and round as (FL)^2 takes it)
        freematch    the same with exponential moving averages of tau and p_c over the client's rounds
                     (Wang et al., 2023, eq. 5 to 8; there over batches, and from 1/C on: ours start with the first
                     round's values)
        flexmatch    T_c = t beta_c / (2 - beta_c), beta_c = sigma_c / max(max_c sigma_c, n - sum_c sigma_c),
                     sigma_c the number of its examples of label c above t (Zhang et al., 2021, eq. 5 to 11; there
                     counted over all of training). With no example above t every threshold is 0, as in FlexMatch.

    Args:
        options: `config.threshold`.
        base: t, the method's threshold.
        scores: float32 [n, C].
        present: bool [n], True for real examples, False for padding.
        own: the client's memory.

    Returns:
        float32 [C], and the entries of the client's memory for its next round.
    """
    num_classes = scores.shape[-1]
    if options.kind == "fixed":
        return jnp.full(num_classes, base, jnp.float32), {}
    best = jnp.max(scores, axis=-1)
    if options.kind == "share":
        ranked = jnp.sort(jnp.where(present, best, -jnp.inf), descending=True)
        ranked = jnp.concatenate([jnp.array([jnp.inf]), ranked, jnp.array([-jnp.inf])])
        k = jnp.round(options.share * jnp.sum(present)).astype(jnp.int32)
        return jnp.full(num_classes, (ranked[k] + ranked[k + 1]) / 2), {}
    if options.kind == "flexmatch":
        above = present & (best > base)
        learned = jnp.sum(jax.nn.one_hot(jnp.argmax(scores, axis=-1), num_classes) * above[:, None], axis=0)
        beta = learned / jnp.maximum(jnp.maximum(jnp.max(learned), jnp.sum(present) - jnp.sum(learned)), 1)
        return base * beta / (2 - beta), {}
    count = jnp.maximum(jnp.sum(present), 1)
    level = jnp.sum(jnp.where(present, best, 0.0)) / count
    if options.kind == "client_mean":
        return jnp.full(num_classes, level), {}
    # Cosines can be negative, and -inf for a class without anchors: below 0 a class has no share.
    by_class = jnp.sum(jnp.where(present[:, None], jnp.maximum(scores, 0.0), 0.0), axis=0) / count
    memory = {}
    if options.kind == "freematch":
        old = own[MEMORY]
        momentum = jnp.where(old["rounds"] > 0, options.momentum, 0.0)
        level = momentum * old["level"] + (1 - momentum) * level
        by_class = momentum * old["by_class"] + (1 - momentum) * by_class
        memory = {MEMORY: {"level": level, "by_class": by_class, "rounds": old["rounds"] + 1}}
    largest = jnp.max(by_class)
    return level * jnp.where(largest > 0, by_class / jnp.where(largest > 0, largest, 1.0), 1.0), memory


def qualify(scores: jax.Array, thresholds: jax.Array | float, strictly: bool) -> tuple[jax.Array, jax.Array]:
    """Hard pseudo-labels, the class of the largest score, and whether each one counts.

    Args:
        scores: float32 [..., C].
        thresholds: float32 [..., C] or a number, in the scores' unit.
        strictly: whether a score at the threshold falls short (FedAnchor, eq. 5) or counts (SemiFL, FixMatch).

    Returns:
        labels int32 [...], qualified bool [...].
    """
    labels = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    thresholds = jnp.broadcast_to(jnp.asarray(thresholds, jnp.float32), scores.shape)
    needed = jnp.take_along_axis(thresholds, labels[..., None], axis=-1)[..., 0]
    best = jnp.max(scores, axis=-1)
    return labels, best > needed if strictly else best >= needed
