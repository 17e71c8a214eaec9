"""Attackers: clients whose uploads are replaced by something else than what they learned, under every method.

`FederatedData.byzantine` says who attacks. Two kinds lie about data instead, and leave uploads as they are:
'labels', where the labels that attackers train on are false (`FederatedData.mislabelled`), and 'poison', where some of
their images are crafted (`fedjax_ssl.data.poison`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.engine.updates import changed_by, moved_by
from fedjax_ssl.learning.trees import all_finite, column, row_norms, weighted_sum, where_rows

LABELS = "labels"  # the kind whose uploads are left as they are
# `attack.strength` where it is 0; of 'little' it is computed from the cohort.
STRENGTHS = {"sign_flip": 1.0, "noise": 1.0, "scaled": 10.0, LABELS: 10.0}


class AttackersView(NamedTuple):
    """What the attackers of a cohort know of it."""

    changes: dict[str, jax.Array]  # of the parameters, by path, leaves [R, ...]: what each client learned
    # lies and honest: bool [R], whose uploads are replaced, and whose arrive as they are.
    lies: jax.Array
    honest: jax.Array
    keys: jax.Array  # one for each row, [R]


def strength_of(options: Any) -> float:
    """`attack.strength`, or its kind's own; 0 for 'little', which computes it."""
    return options.strength or STRENGTHS.get(options.kind, 0.0)


def sign_flip(seen: AttackersView, strength: float) -> dict[str, jax.Array]:
    """The update in the other direction, so many times as long."""
    return jax.tree.map(lambda leaf: -strength * leaf, seen.changes)


def scaled(seen: AttackersView, strength: float) -> dict[str, jax.Array]:
    """So many times the update.

    Source: Bagdasaryan et al., How to Backdoor Federated Learning, AISTATS 2020, section 4 (model replacement).
    """
    return jax.tree.map(lambda leaf: strength * leaf, seen.changes)


def noise(seen: AttackersView, strength: float) -> dict[str, jax.Array]:
    """Gaussian noise so many times as long as the update."""

    def noise_like(key, change):
        leaves, structure = jax.tree.flatten(change)
        keys = jax.random.split(key, len(leaves))
        drawn = [jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves)]
        return jax.tree.unflatten(structure, drawn)

    directions = jax.vmap(noise_like)(seen.keys, seen.changes)
    factors = strength * row_norms(seen.changes) / row_norms(directions)
    return jax.tree.map(lambda leaf: leaf * column(factors, leaf), directions)


def little(seen: AttackersView, strength: float) -> dict[str, jax.Array]:
    """In every number the mean of the honest updates less so many of their standard deviations: all attackers alike.

    Without a strength it is the paper's z_max: of n clients and m attackers, the z of the standard normal distribution
    at (n - m - s) / (n - m), s = floor(n / 2 + 1) - m, so that as many honest clients as a majority wants are farther
    from their mean. The attackers know the honest updates; in the paper they estimate them from their own.

    Source: Baruch et al., A Little Is Enough, NeurIPS 2019, Algorithm 3.
    """
    honest = seen.honest & all_finite(seen.changes, batch_ndim=1)
    num_honest, num_lies = jnp.sum(honest), jnp.sum(seen.lies)
    supporters = (num_honest + num_lies) // 2 + 1 - num_lies
    # If attackers are a majority, no honest upload has to be farther and any z would do: 3 at most.
    share = jnp.clip((num_honest - supporters) / jnp.maximum(num_honest, 1), 0.5, 0.9987)
    times = strength or jax.scipy.stats.norm.ppf(share)

    def of(leaf):
        counted = column(honest, leaf)
        count = jnp.maximum(num_honest, 1).astype(leaf.dtype)
        mean = weighted_sum(honest, jnp.where(counted, leaf, 0)) / count
        deviation = jnp.sqrt(weighted_sum(honest, jnp.where(counted, (leaf - mean) ** 2, 0)) / count)
        return jnp.broadcast_to(mean - times * deviation, leaf.shape)

    return jax.tree.map(of, seen.changes)


ATTACKS: dict[str, Callable[[AttackersView, float], dict[str, jax.Array]]] = {
    "sign_flip": sign_flip,
    "noise": noise,
    "scaled": scaled,
    "little": little,
}


def attacked(options: Any, uploads: Any, broadcast: Any, lies: jax.Array, honest: jax.Array, keys: jax.Array) -> Any:
    """A cohort's uploads with those of its attackers. Parameters are replaced; statistics, and what is told, are not.

    Args:
        options: `config.attack`.
        uploads: Upload with leaves [R, ...].
        broadcast: what went down.
        lies, honest, keys: see `AttackersView`.
    """
    if options.kind not in ATTACKS:
        return uploads
    changes = changed_by(uploads.model.params, broadcast)
    false = ATTACKS[options.kind](AttackersView(changes, lies, honest, keys), strength_of(options))
    params = moved_by(where_rows(lies, false, changes), uploads.model.params, broadcast)
    return uploads._replace(model=uploads.model._replace(params=params))


def told_counts(options: Any, counts: jax.Array, lies: jax.Array) -> jax.Array:
    """Counts of examples, int32 [R], as the clients tell them: attackers of the kind 'labels' exaggerate."""
    if options.kind != LABELS:
        return counts
    return jnp.where(lies, jnp.round(strength_of(options) * counts).astype(counts.dtype), counts)
