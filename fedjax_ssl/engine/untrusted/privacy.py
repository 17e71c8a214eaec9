"""Client-level differential privacy: the server gets only the sum of a round's clipped uploads, with Gaussian noise.

Methods see the sum after the noise, so no aggregation can break the guarantee. Source: McMahan et al., Learning
Differentially Private Recurrent Language Models, ICLR 2018, Algorithm 1, with the fixed denominator of its section
2.2.

Noise and cohorts are drawn from the run's secret, not from its seed, which may be known. JAX's keys have 64 bits,
which can be tried out. So the secret is four keys, and each number is made of a draw from each of them.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Broadcast, Received, Select, Selection, State, Upload
from fedjax_ssl.engine.untrusted.updates import changed_by, moved_by
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import column, row_norms, weighted_sum

NUM_KEYS = 4
_NOISE, _COHORT = range(2)  # purposes of keys
OVERFLOW = 1e-15  # bound of the probability that a Poisson cohort has more clients than rows; the surplus is left out


def round_secret(secret: jax.Array, round_number: jax.Array, purpose: int) -> jax.Array:
    """The four keys for a purpose of a round, from the run's secret, uint32 [4, 2]."""
    keys = jax.random.wrap_key_data(secret, impl="threefry2x32")
    return jax.vmap(lambda key: jax.random.fold_in(jax.random.fold_in(key, round_number), purpose))(keys)


def one_private_upload(
    options: Any, received: Received, broadcast: Broadcast, secret: jax.Array, round_number: jax.Array
) -> Received:
    """Replaces a round's uploads by one, w + (sum_m clip(w_m - w) + N(0, (z S)^2)) / M, with clipping norm S.

    An upload that is missing or not accepted adds 0 to the sum; without uploads only the noise is left. M is always
    `clients_per_round`, S is `aggregation.clip_norm`, z is `privacy.noise`. Statistics and metadata are ignored.
    """
    bound = options.aggregation.clip_norm
    changes = changed_by(received.uploads.model.params, broadcast)
    counted = received.accepted
    changes = jax.tree.map(lambda leaf: jnp.where(column(counted, leaf), leaf, 0), changes)
    # Clients clip their updates themselves; an update that was not clipped must not count more.
    factors = jnp.minimum(1.0, bound / jnp.maximum(row_norms(changes), jnp.finfo(jnp.float32).tiny))

    keys = round_secret(secret, round_number, _NOISE)

    def noisy_mean(number, leaf):
        total = weighted_sum(factors, leaf)[None]
        own = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)
        drawn = jax.vmap(lambda key: jax.random.normal(key, total.shape, total.dtype))(own)
        noise = options.privacy.noise * bound * jnp.sum(drawn, axis=0) / NUM_KEYS**0.5
        return (total + noise) / options.clients_per_round

    means = {path: noisy_mean(number, leaf) for number, (path, leaf) in enumerate(changes.items())}
    params = moved_by(means, received.uploads.model.params, broadcast)
    one = jnp.ones(1, jnp.int32)
    return Received(Upload(Model(params, ())), one > 0, 0 * one, None, one, one)


def private_cohort(options: Any) -> Select:
    """The `select` of a private run: a cohort that only the secret determines, since epsilon counts on this.

    With `privacy.cohorts='poisson'` each client joins independently with probability M / K, and the selection has
    enough rows for a cohort with probability 1 - `OVERFLOW`. With 'fixed' M clients are drawn without replacement.
    """
    num_clients, expected = options.num_clients, options.clients_per_round
    if options.privacy.cohorts == "fixed":
        return lambda state, data, key: Selection(jnp.argsort(_bits(state, data, num_clients))[:expected])
    from scipy.stats import binom  # imported here, because the import takes half a second

    probability = expected / num_clients
    num_rows = min(num_clients, max(1, int(binom.isf(OVERFLOW, num_clients, probability))))
    largest = max(int(probability * 2**32), 1) - 1  # of 2^32 equally likely numbers

    def select(state: State, data: FederatedData, key: jax.Array) -> Selection:
        del key
        joins = _bits(state, data, num_clients) <= jnp.uint32(largest)
        clients = jnp.argsort(~joins, stable=True)[:num_rows].astype(jnp.int32)
        return Selection(clients, present=joins[clients])

    return select


def _bits(state: State, data: FederatedData, number: int) -> jax.Array:
    """Uniform numbers of a round, uint32 [number]."""
    keys = round_secret(data.secret, state.round, _COHORT)
    drawn = jax.vmap(lambda key: jax.random.bits(key, (number,), jnp.uint32))(keys)
    return drawn[0] ^ drawn[1] ^ drawn[2] ^ drawn[3]
