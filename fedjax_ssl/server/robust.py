"""Robust means of uploads, which a few clients cannot change much, as pure functions.

A rule takes any pytree: parameters, or statistics in `units`. Only `geometric_median` uses the weights; all others only
leave out uploads of weight 0."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.ops.sgd import BatchStats, Model
from fedjax_ssl.ops.trees import clip_update, column, row_norms, weighted_sum, where

WEISZFELD_STEPS = 10
SMOOTHING = 1e-5  # nu of RFA: weights are divided by distances, which are at least nu
LEAST_VARIANCE = 1e-5  # of a unit of statistics, as normalisation adds it to variances


def coordinate_median(uploads: Any, weights: jax.Array, otherwise: Any, share: float) -> Any:
    """The coordinate-wise median; for an even number of uploads the mean of the middle two.

    Uploads have leaves [R, ...]. Those with a weight, float32 [R], above 0 count; without any the result is
    `otherwise`, leaves [...]. The share of clients that may lie is ignored here.

    Source: Yin et al., Byzantine-Robust Distributed Learning, ICML 2018, Definition 1.
    """
    del share
    count = jnp.sum(weights > 0)
    return _between(uploads, weights, otherwise, (count - 1) // 2, count // 2)


def trimmed_mean(uploads: Any, weights: jax.Array, otherwise: Any, share: float) -> Any:
    """The coordinate-wise mean, without the floor(share n) largest and the floor(share n) smallest of n values.

    Arguments as in `coordinate_median`; the share is beta, below 1/2. Source: Yin et al., ICML 2018, Definition 2.
    """
    count = jnp.sum(weights > 0)
    cut = jnp.minimum(_floor(share, count), (count - 1) // 2)  # at least one value stays
    return _between(uploads, weights, otherwise, cut, count - 1 - cut)


def krum(uploads: Any, weights: jax.Array, otherwise: Any, share: float) -> Any:
    """The upload with the smallest sum of squared distances to its n - f - 2 nearest others, f = floor(share n).

    Distances are over all leaves as one vector. Arguments as in `coordinate_median`; the proof requires 2 f + 2 < n.

    Source: Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017, section 4.
    """
    scores, _ = krum_scores(uploads, weights, otherwise, share)
    chosen = jax.tree.map(lambda leaf: leaf[jnp.argmin(scores)], uploads)
    return where(jnp.any(weights > 0), chosen, otherwise)


def multi_krum(uploads: Any, weights: jax.Array, otherwise: Any, share: float) -> Any:
    """The plain mean of the n - f - 2 uploads (at least one) with the smallest scores of `krum`.

    Source: El Mhamdi et al., The Hidden Vulnerability of Distributed Learning, ICML 2018, for the number; Blanchard et
    al., NeurIPS 2017, section 5, for the rule.
    """
    scores, nearest = krum_scores(uploads, weights, otherwise, share)
    rank = jnp.argsort(jnp.argsort(scores, stable=True), stable=True)
    chosen = (rank < nearest) & (weights > 0)
    return where(jnp.any(chosen), jax.tree.map(lambda leaf: _plain_mean(leaf, chosen), uploads), otherwise)


def krum_scores(uploads: Any, weights: jax.Array, otherwise: Any, share: float) -> tuple[jax.Array, jax.Array]:
    """Each upload's score, the sum of squared distances to its nearest others, float32 [R]; and their number, int32 [].

    An upload of weight 0 has an infinite score and is no neighbour of others. A square that overflows float32 counts as
    infinite; a score with such a square is the largest float32.
    """
    counted = weights > 0
    count = jnp.sum(counted)
    nearest = jnp.maximum(count - _floor(share, count) - 2, 1)
    leaves = zip(*map(jax.tree.leaves, (uploads, otherwise)))
    squares = sum(_squared_distances(leaf, origin, counted) for leaf, origin in leaves)
    squares = jnp.where(jnp.isnan(squares), jnp.inf, squares)  # both uploads are too large
    squares = jnp.where(counted[:, None] & counted[None, :] & ~jnp.eye(len(counted), dtype=bool), squares, jnp.inf)
    # A single upload has no neighbour and the score 0.
    neighbours = jnp.arange(len(counted)) < jnp.minimum(nearest, count - 1)
    summed = jnp.sum(jnp.where(neighbours, jnp.sort(squares, axis=1), 0.0), axis=1)
    return jnp.where(counted, jnp.minimum(summed, jnp.finfo(summed.dtype).max), jnp.inf), nearest


def geometric_median(uploads: Any, weights: jax.Array, otherwise: Any, share: float) -> Any:
    """The point with the smallest weighted sum of distances, by Weiszfeld's steps from the coordinate-wise median.

    The start is our choice. From the weighted mean, with an upload of 1e19 among eight, ten steps would end at 1e9.
    Weights above their (lower) median are lowered to it: else a client that claims many examples chooses the point.
    Arguments as in `coordinate_median`.

    Source: Pillutla et al., Robust Aggregation for Federated Learning, 2019 (RFA), Algorithm 2, with nu = 1e-5.
    """
    counted = weights > 0
    weights = jnp.minimum(weights, jnp.nanquantile(jnp.where(counted, weights, jnp.nan), 0.5, method="lower"))
    start = coordinate_median(uploads, weights, otherwise, share)

    def mean_by(beta):
        shares = beta / jnp.maximum(jnp.sum(beta), jnp.finfo(jnp.float32).tiny)
        return lambda leaf: weighted_sum(shares, _counted_only(leaf, counted))

    def weights_at(median):
        away = jax.tree.map(lambda leaf, m: jnp.where(column(counted, leaf), leaf - m, 0), uploads, median)
        return weights / jnp.maximum(row_norms(away), SMOOTHING)

    def step(_, beta):
        return weights_at(jax.tree.map(mean_by(beta), uploads))

    beta = jax.lax.fori_loop(0, WEISZFELD_STEPS - 1, step, weights_at(start))
    return where(jnp.any(counted), jax.tree.map(mean_by(beta), uploads), otherwise)


def units(statistics: BatchStats, weights: jax.Array) -> BatchStats:
    """The unit of each statistic, so that distances between statistics count all channels alike.

    It is the median variance of a channel over the uploads with a weight, float32 [R], for its variance, and the root
    of it for its mean. Statistics are nested dicts whose innermost ones have `mean` and `var`, [R, ...], or moments of
    these names.
    """
    if isinstance(statistics.get("var", {}), Mapping):
        return {name: units(part, weights) for name, part in statistics.items()}
    counted = column(weights > 0, statistics["var"])
    typical = jnp.nan_to_num(jnp.nanmedian(jnp.where(counted, statistics["var"], jnp.nan), axis=0)) + LEAST_VARIANCE
    return {"mean": jnp.sqrt(typical), "var": typical}


def bounded(uploads: Model, received: Model, length: float) -> Model:
    """Clips updates to a Euclidean norm of at most `length`: parameters and statistics separately, each as one vector.

    Uploads have leaves [R, ...]. Source: Sun et al., Can You Really Backdoor Federated Learning?, 2019.
    """

    def shortened(new, old):
        return jax.vmap(lambda own: clip_update(own, old, length))(new) if jax.tree.leaves(new) else new

    return Model(*map(shortened, uploads, received))


def _counted_only(leaf: jax.Array, counted: jax.Array) -> jax.Array:
    return jnp.where(column(counted, leaf), leaf, 0)


def _plain_mean(leaf: jax.Array, chosen: jax.Array) -> jax.Array:
    """The mean over the chosen rows, bool [R], of a leaf [R, ...]; 0 if none is chosen."""
    return weighted_sum(chosen, _counted_only(leaf, chosen)) / jnp.maximum(jnp.sum(chosen), 1).astype(leaf.dtype)


def _floor(share: float, count: jax.Array) -> jax.Array:
    """floor(share n), int32 []; 1e-5 is added, because in float32 0.42 * 150 is slightly below 63."""
    return jnp.floor(share * count + 1e-5).astype(jnp.int32)


def _between(uploads: Any, weights: jax.Array, otherwise: Any, first: jax.Array, last: jax.Array) -> Any:
    """The coordinate-wise mean of the values whose ascending rank is from `first` to `last`."""
    places = jnp.arange(len(weights))
    inside = (places >= first) & (places <= last)

    def of(leaf):
        return _plain_mean(jnp.sort(jnp.where(column(weights > 0, leaf), leaf, jnp.inf), axis=0), inside)

    return where(jnp.any(weights > 0), jax.tree.map(of, uploads), otherwise)


def _squared_distances(leaf: jax.Array, origin: jax.Array, counted: jax.Array) -> jax.Array:
    """Squared distances between one leaf's rows, [R, R]; NaN if squares overflow. `origin` should be near the rows."""
    away = _counted_only(leaf - origin, counted).reshape(len(leaf), -1)
    squares = jnp.sum(away**2, axis=1)
    products = jnp.matmul(away, away.T, precision="highest")
    return jnp.maximum(squares[:, None] + squares[None, :] - 2 * products, 0.0)
