"""Weights of uploads if some clients have labels and others have none: each role has its share of the mean."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_ssl.engine.interface import Received
from fedjax_ssl.ops.trees import add_up
from fedjax_ssl.server.aggregation import Link, own_weights


def by_role(
    labelled: Callable[[Received], jax.Array], unlabelled: Callable[[Received], jax.Array], share: float
) -> Link:
    """Sets the weights w_k = l1 n_k / sum_L n + (1 - l1) u_k / sum_U u, FedAvg-Semi's mean (SemiAnAgg, eq. 2).

    A client with images of both kinds uploads one model, whose weight is the sum of both terms. If no upload counts in
    one role, the other role has all the weight. `labelled` and `unlabelled` give n_k and u_k of the received uploads,
    float32 [R], not negative; l1 is `share`.
    """

    def rule(received: Received) -> jax.Array:
        counts, scores = (jnp.where(received.accepted, of(received), 0.0) for of in (labelled, unlabelled))
        return role_weights(counts, scores, share)

    return own_weights(rule)


def role_weights(labelled: jax.Array, unlabelled: jax.Array, share: float) -> jax.Array:
    """The weights of `by_role`, float32 [R], from n_k and u_k. They sum to 1, or are all 0 if no upload counts."""
    of_labelled, of_unlabelled = jnp.sum(labelled), jnp.sum(unlabelled)
    first = jnp.where(of_labelled > 0, jnp.where(of_unlabelled > 0, share, 1.0), 0.0)
    second = jnp.where(of_unlabelled > 0, jnp.where(of_labelled > 0, 1.0 - share, 1.0), 0.0)
    parts = (first, labelled, of_labelled), (second, unlabelled, of_unlabelled)
    return add_up(weight * scores / jnp.where(total > 0, total, 1.0) for weight, scores, total in parts)
