"""Attacks for any method: attackers replace their uploads.

`FederatedData.attackers` marks the attackers. Two kinds leave uploads unchanged and attack the data instead: with
'labels' attackers train on false labels (`Attackers.mislabelled`), with 'poison' they craft some of their images
(`fedjax_ssl.data.poison`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.base.fields import is_on
from fedjax_ssl.engine.interface import Broadcast
from fedjax_ssl.engine.untrusted.updates import changed_by, moved_by
from fedjax_ssl.ops.trees import all_finite, column, row_norms, weighted_sum, where_rows

LABELS = "labels"  # the kind that trains on false labels
# The strength if `attack.strength` is 0; for 'little' it is computed from the cohort.
STRENGTHS = {"sign_flip": 1.0, "noise": 1.0, "scaled": 10.0, LABELS: 10.0}


class AttackersView(NamedTuple):
    """What the attackers know about their cohort."""

    changes: dict[str, jax.Array]  # changes of the parameters by path, leaves [R, ...]: each client's update
    # lies and honest: bool [R], the uploads to be replaced, and those that arrive unchanged.
    lies: jax.Array
    honest: jax.Array
    keys: jax.Array  # [R], a PRNG key for each row


def strength_of(options: Any) -> float:
    """`attack.strength`, or the kind's default if this is 0; the default of 'little' is 0: it computes its strength."""
    return options.strength if is_on(options.strength) else STRENGTHS.get(options.kind, 0.0)


def sign_flip(seen: AttackersView, strength: float) -> dict[str, jax.Array]:
    """The update times -strength."""
    return jax.tree.map(lambda leaf: -strength * leaf, seen.changes)


def scaled(seen: AttackersView, strength: float) -> dict[str, jax.Array]:
    """The update times the strength.

    Source: Bagdasaryan et al., How to Backdoor Federated Learning, AISTATS 2020, section 4 (model replacement).
    """
    return jax.tree.map(lambda leaf: strength * leaf, seen.changes)


def noise(seen: AttackersView, strength: float) -> dict[str, jax.Array]:
    """Gaussian noise, `strength` times as long as the update."""

    def noise_like(key, change):
        leaves, structure = jax.tree.flatten(change)
        keys = jax.random.split(key, len(leaves))
        drawn = [jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves)]
        return jax.tree.unflatten(structure, drawn)

    directions = jax.vmap(noise_like)(seen.keys, seen.changes)
    factors = strength * row_norms(seen.changes) / row_norms(directions)
    return jax.tree.map(lambda leaf: leaf * column(factors, leaf), directions)


def little(seen: AttackersView, strength: float) -> dict[str, jax.Array]:
    """For every parameter, the mean of the honest updates minus `strength` standard deviations, for all attackers.

    If the strength is 0, it is the paper's z_max: for n clients and m attackers, the normal quantile of
    (n - m - s) / (n - m) with s = floor(n / 2 + 1) - m. Then s honest updates are farther from the mean, and form a
    majority with the attackers. Here the attackers know the honest updates; in the paper they estimate them from their
    own updates.

    Source: Baruch et al., A Little Is Enough, NeurIPS 2019, Algorithm 3.
    """
    honest = seen.honest & all_finite(seen.changes, batch_ndim=1)
    num_honest, num_lies = jnp.sum(honest), jnp.sum(seen.lies)
    supporters = (num_honest + num_lies) // 2 + 1 - num_lies
    # If the attackers are a majority, any z works; the bound keeps it below about 3.
    share = jnp.clip((num_honest - supporters) / jnp.maximum(num_honest, 1), 0.5, 0.9987)
    times = strength if is_on(strength) else jax.scipy.stats.norm.ppf(share)

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


def attacked(
    options: Any, uploads: Any, broadcast: Broadcast, lies: jax.Array, honest: jax.Array, keys: jax.Array
) -> Any:
    """Replaces the attackers' uploads, leaves [R, ...]. Only parameters are replaced; the rest stays as it is.

    `options` is `config.attack`; for lies, honest and keys see `AttackersView`.
    """
    if options.kind not in ATTACKS:
        return uploads
    changes = changed_by(uploads.model.params, broadcast)
    false = ATTACKS[options.kind](AttackersView(changes, lies, honest, keys), strength_of(options))
    params = moved_by(where_rows(lies, false, changes), uploads.model.params, broadcast)
    return uploads._replace(model=uploads.model._replace(params=params))


def told_counts(options: Any, counts: jax.Array, lies: jax.Array) -> jax.Array:
    """The example counts, int32 [R], that clients report: attackers of the kind 'labels' report too many."""
    if options.kind != LABELS:
        return counts
    return jnp.where(lies, jnp.round(strength_of(options) * counts).astype(counts.dtype), counts)
