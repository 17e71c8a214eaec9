"""Sub-consensus models: uploads in groups, each weighted by its distance to the mean of its group (RSCFed)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.engine.interface import Received
from fedjax_ssl.ops.trees import column, row_norms, weighted_sum
from fedjax_ssl.server.aggregation import Link, client_weights, group_members, own_weights


def distance_reweighted(
    kind: str,
    num_groups: int,
    is_labelled: Callable[[Received], jax.Array],
    *,
    factor: float,
    beta: float,
    beta_labelled: float,
) -> Link:
    """Weights uploads so that their mean is the plain mean of the models of all groups that have uploads.

    f_i is the share of upload i in its group by `aggregation.weights`, wbar = sum_i f_i w_i, d_i = |w_i - wbar|. The
    group's model is sum_i u_i w_i, with u_i ~ f_i exp(-beta d_i / n_i) times the factor of a labelled client.

    Args:
        kind: how f_i is computed, see `client_weights`.
        num_groups: G; `Received.group` is 0 to G - 1, None for one group.
        is_labelled: received -> bool [R], the uploads whose weight is multiplied.
        factor: their factor.
        beta: beta of a group without a labelled client.
        beta_labelled: beta of a group with a labelled client.
    """

    def rule(received: Received) -> jax.Array:
        sizes = client_weights(kind, received.sizes, received.num_qualified, received.accepted)
        in_group = group_members(received, num_groups)
        labelled = is_labelled(received)
        factors = jnp.where(labelled, factor, 1.0)
        shares = jnp.where(in_group, sizes, 0.0)
        shares /= jnp.maximum(jnp.sum(shares, axis=1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        distances = distances_to_mean(received.uploads.model, shares, in_group)
        betas = jnp.where(jnp.any(in_group & labelled, axis=1), beta_labelled, beta)
        weights = consensus_weights(shares, distances, received.sizes, factors, betas)
        return jnp.sum(weights, axis=0)

    return own_weights(rule)


def distances_to_mean(models: Any, shares: jax.Array, in_group: jax.Array) -> jax.Array:
    """d_i = |w_i - wbar| of each group's models, wbar = sum_i f_i w_i, summed over their tensors.

    Args:
        models: a pytree with leaves [R, ...], including normalisation statistics; a row in no group is ignored.
        shares: float32 [G, R], f_i, whose rows sum to 1 or are 0.
        in_group: bool [G, R].

    Returns:
        float32 [G, R], 0 for a row that is not in the group.
    """
    models = jax.tree.map(lambda leaf: jnp.where(column(jnp.any(in_group, axis=0), leaf), leaf, 0), models)

    def of_group(group):
        share, members = group

        def deviation(leaf):
            return jnp.where(column(members, leaf), leaf - weighted_sum(share, leaf), 0)

        return sum(row_norms(deviation(leaf)) for leaf in jax.tree.leaves(models))

    return jax.lax.map(of_group, (shares, in_group))


def consensus_weights(
    shares: jax.Array, distances: jax.Array, sizes: jax.Array, factors: jax.Array, betas: jax.Array
) -> jax.Array:
    """u_i = factor_i f_i exp(-beta d_i / n_i), normalised in each group; the nearest upload's weight never underflows.

    Args:
        shares: float32 [G, R], f_i; a group without shares has no weights.
        distances: float32 [G, R], d_i.
        sizes: int32 [R], n_i.
        factors: float32 [R].
        betas: float32 [G].

    Returns:
        float32 [G, R], whose rows sum to 1 or are 0.
    """
    exponents = jnp.where(shares > 0, betas[:, None] * distances / jnp.maximum(sizes, 1), jnp.inf)
    least = jnp.min(exponents, axis=1, keepdims=True)
    nearness = jnp.where(shares > 0, jnp.exp(least - exponents), 0.0)
    weights = shares * factors * nearness
    return weights / jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), jnp.finfo(jnp.float32).tiny)
