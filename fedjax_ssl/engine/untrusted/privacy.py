"""Client-level differential privacy: the server gets only the sum of a round's clipped uploads, with Gaussian noise.

Methods see the sum after the noise, so no aggregation can break the guarantee. Source: McMahan et al., Learning
Differentially Private Recurrent Language Models, ICLR 2018, Algorithm 1, with the fixed denominator of its section 2.2.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Broadcast, Received, Select, Selection, State, Upload
from fedjax_ssl.engine.untrusted.updates import changed_by, moved_by
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import column, row_norms, weighted_sum

OVERFLOW = 1e-15  # bound of the probability that a Poisson cohort has more clients than rows; the surplus is left out


def one_private_upload(options: Any, received: Received, broadcast: Broadcast, key: jax.Array) -> Received:
    """Replaces a round's uploads by one, w + (sum_m clip(w_m - w) + N(0, (z S)^2)) / M, with clipping norm S.

    An upload that is missing or not accepted adds 0 to the sum; without uploads only the noise is left. M is always
    `clients_per_round`.

    Args:
        options: the configuration; S is `aggregation.clip_norm`, z is `privacy.noise`.
        received: R rows; statistics and metadata are ignored.
        broadcast: the broadcast of this round.
        key: PRNG key of the noise.

    Returns:
        Received with one row.
    """
    bound = options.aggregation.clip_norm
    changes = changed_by(received.uploads.model.params, broadcast)
    counted = received.accepted
    changes = jax.tree.map(lambda leaf: jnp.where(column(counted, leaf), leaf, 0), changes)
    # Clients clip their updates themselves; an update that was not clipped must not count more.
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
    """The `select` of Poisson sampling: each client joins a cohort independently with probability M / K.

    Args:
        num_clients: K.
        expected: M.

    Returns:
        The stage. Its selection has enough rows for a cohort with probability 1 - `OVERFLOW`.
    """
    from scipy.stats import binom  # imported here, because the import takes half a second

    probability = expected / num_clients
    num_rows = min(num_clients, max(1, int(binom.isf(OVERFLOW, num_clients, probability))))

    def select(state: State, data: FederatedData, key: jax.Array) -> Selection:
        del state, data
        joins = jax.random.bernoulli(key, probability, (num_clients,))
        clients = jnp.argsort(~joins, stable=True)[:num_rows].astype(jnp.int32)
        return Selection(clients, present=joins[clients])

    return select
