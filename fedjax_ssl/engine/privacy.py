"""Differential privacy of clients: the server gets a round's uploads only as their clipped sum with Gaussian noise.

Methods see the sum after the noise, so no aggregation can break the promise. Source:
McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018, Algorithm 1, with the fixed
denominator of its section 2.2.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Received, Select, Selection, State, Upload
from fedjax_ssl.engine.updates import changed_by, moved_by
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.learning.trees import column, row_norms, weighted_sum

OVERFLOW = 1e-15  # the probability that a Poisson cohort has more clients than rows; those that are left out stay away


def one_private_upload(options: Any, received: Received, broadcast: Any, key: jax.Array) -> Received:
    """w + (sum_m clip(w_m - w) + N(0, (z S)^2)) / M as the only upload of a round, S the clipping norm.

    An upload that is not accepted, or did not come, is 0 in the sum; without any there is the noise alone. M is
    `clients_per_round`, however many came.

    Args:
        options: the configuration; S is `aggregation.clip_norm`, z `privacy.noise`.
        received: R rows, without statistics, and with nothing told.
        broadcast: what went down.
        key: of the noise.

    Returns:
        Received of one row.
    """
    bound = options.aggregation.clip_norm
    changes = changed_by(received.uploads.model.params, broadcast)
    counted = received.accepted
    changes = jax.tree.map(lambda leaf: jnp.where(column(counted, leaf), leaf, 0), changes)
    # Clients have clipped; an upload that was not clipped must not count for more.
    factors = jnp.minimum(1.0, bound / jnp.maximum(row_norms(changes), jnp.finfo(jnp.float32).tiny))

    def noisy_mean(key, leaf):
        total = weighted_sum(factors, leaf)[None]
        noise = options.privacy.noise * bound * jax.random.normal(key, total.shape, total.dtype)
        return (total + noise) / options.clients_per_round

    keys = jax.random.split(key, len(changes))
    means = {path: noisy_mean(one, leaf) for one, (path, leaf) in zip(keys, changes.items())}
    params = moved_by(means, received.uploads.model.params, broadcast)
    one = jnp.ones(1, jnp.int32)
    return Received(Upload(Model(params, ())), one > 0, 0 * one, None, one, one)


def poisson(num_clients: int, expected: int) -> Select:
    """The `select` by which each client is in a cohort by itself, with probability M / K.

    Args:
        num_clients: K.
        expected: M.

    Returns:
        The stage; its selection has as many rows as a cohort has with probability 1 - `OVERFLOW`.
    """
    from scipy.stats import binom  # half a second, which every start would wait

    probability = expected / num_clients
    num_rows = min(num_clients, max(1, int(binom.isf(OVERFLOW, num_clients, probability))))

    def select(state: State, data: FederatedData, key: jax.Array) -> Selection:
        del state, data
        joins = jax.random.bernoulli(key, probability, (num_clients,))
        clients = jnp.argsort(~joins, stable=True)[:num_rows].astype(jnp.int32)
        return Selection(clients, present=joins[clients])

    return select
