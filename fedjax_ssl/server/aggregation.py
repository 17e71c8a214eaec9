"""From stacked uploads to one model: weights, clipping, the weighted mean, and a server optimiser."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.engine.interface import Problem, Received, State, model_upload
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.learning.trees import column, norm, row_norms, select, where

WEIGHTS = ("size", "qualified", "uniform")
# The server's step along the mean of the clients' updates; every one of them is optax's.
OPTIMIZERS = {
    "fedavg": lambda options: None,  # the mean itself (McMahan et al., 2017)
    "fedavgm": lambda options: optax.sgd(options.learning_rate, options.momentum),  # SemiFL's server momentum
    "fedadagrad": lambda options: optax.adagrad(options.learning_rate, eps=options.adaptivity),
    "fedadam": lambda options: optax.adam(options.learning_rate, options.momentum, 0.99, options.adaptivity),
    "fedyogi": lambda options: optax.yogi(options.learning_rate, options.momentum, 0.99, options.adaptivity),
}
OPT_STATE = "aggregation"  # the entry of `State.server` that a server optimiser has


class Aggregation(NamedTuple):
    """Two pure functions.

    Attributes:
        init: params -> the entries of `State.server` that aggregation needs.
        aggregate: (state, received) -> (state, metrics), the stage of a method.
    """

    init: Callable[[Any], dict[str, Any]]
    aggregate: Callable[[State, Received], tuple[State, dict[str, jax.Array]]]


def make_aggregation(
    problem: Problem,
    parts: tuple[str, ...],
    screen: Callable[[State, Received], jax.Array] | None = None,
    optimizer: optax.GradientTransformation | None = None,
    beside: Callable[[State], Any] | None = None,
) -> Aggregation:
    """The chain: weights, screened; clipped updates; their mean; a model beside it; the server optimiser.

    Statistics of normalisation layers take the same weights, and neither clipping nor optimiser.

    Args:
        problem: the run, for `config.aggregation`.
        parts: of the model that the uploads hold.
        screen: what a method's own rule multiplies the weights by, float32 or bool [R].
        optimizer: any transformation of optax, instead of the one that the configuration names.
        beside: a Model of the server's own that has half the weight, the clients
            together the other half; all of it where nothing was accepted.

    Returns:
        The Aggregation. Where nothing was accepted, and nothing stands beside, the model and the optimiser's state
        stay as they are. Its metric is `update_norm`, the Euclidean length of the model's change.
    """
    options, network = problem.config.aggregation, problem.network
    optimizer = optimizer or OPTIMIZERS[options.optimizer](options)

    def init(params) -> dict[str, Any]:
        return {} if optimizer is None else {OPT_STATE: optimizer.init(select(params, parts))}

    def aggregate(state: State, received: Received):
        weights = client_weights(options.weights, received.sizes, received.num_qualified, received.accepted)
        if screen is not None:
            weights = weights * screen(state, received)
        uploads, current = received.uploads, model_upload(network, state.model, parts)
        if options.clip_norm:
            uploads = uploads._replace(params=clip_updates(uploads.params, current.params, options.clip_norm))
        own = current if beside is None else model_upload(network, beside(state), parts)
        model = weighted_mean(uploads, weights, otherwise=own)
        if beside is not None:
            model = jax.tree.map(lambda clients, server: 0.5 * clients + 0.5 * server, model, own)
        params, server = model.params, state.server
        if optimizer is not None:
            # The mean update is what the optimiser takes for a descent direction: a negative gradient.
            gradient = jax.tree.map(jnp.subtract, current.params, model.params)
            updates, opt_state = optimizer.update(gradient, server[OPT_STATE], current.params)
            moved = optax.apply_updates(current.params, updates), opt_state
            anything = (jnp.sum(weights) > 0) | (beside is not None)
            params, opt_state = where(anything, moved, (current.params, server[OPT_STATE]))
            server = {**server, OPT_STATE: opt_state}
        change = norm(jax.tree.map(jnp.subtract, params, current.params))
        whole = Model({**state.model.params, **params}, model.batch_stats or state.model.batch_stats)
        return state._replace(model=whole, server=server), {"update_norm": change}

    return Aggregation(init, aggregate)


def client_weights(kind: str, sizes: jax.Array, num_qualified: jax.Array, accepted: jax.Array) -> jax.Array:
    """How much each upload counts, before normalisation.

    Args:
        kind: 'size', n_m the client's examples (FedAvg; FedAnchor's n_m / sum n_m); 'qualified', its examples
            with an accepted pseudo-label; 'uniform', one each (SemiFL, FedIL).
        sizes: int32 [M].
        num_qualified: int32 [M].
        accepted: bool [M], whether there is an upload that counts at all.

    Returns:
        float32 [M], 0 where nothing was accepted.
    """
    by_kind = {"size": sizes, "qualified": num_qualified, "uniform": jnp.ones_like(sizes)}
    return jnp.where(accepted, by_kind[kind].astype(jnp.float32), 0.0)


def weighted_mean(uploads: Any, weights: jax.Array, otherwise: Any) -> Any:
    """sum_m w_m upload_m / sum_m w_m over the leading axis, FedAvg's aggregation.

    Args:
        uploads: a pytree, every leaf [M, ...]; a row of weight 0 may hold anything, non-finite numbers too.
        weights: float32 [M], not negative.
        otherwise: the pytree to return where all weights are 0.

    Returns:
        A pytree like `otherwise`.
    """
    total = jnp.sum(weights)
    shares = weights / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)

    def mean(stacked, fallback):
        counted = jnp.where(column(weights > 0, stacked), stacked, 0)
        average = jnp.sum(counted * column(shares, stacked).astype(stacked.dtype), axis=0)
        return jnp.where(total > 0, average, fallback)

    return jax.tree.map(mean, uploads, otherwise)


def clip_updates(uploads: Any, current: Any, max_norm: float) -> Any:
    """Shortens each client's update to a length: w + (w_m - w) min(1, max_norm / |w_m - w|).

    Args:
        uploads: parameters, every leaf [M, ...].
        current: the model that the clients started from, leaves [...].
        max_norm: of the whole update.
    """
    updates = jax.tree.map(lambda stacked, now: stacked - now, uploads, current)
    factor = jnp.minimum(1.0, max_norm / jnp.maximum(row_norms(updates), jnp.finfo(jnp.float32).tiny))
    return jax.tree.map(lambda update, now: now + update * column(factor, update), updates, current)
