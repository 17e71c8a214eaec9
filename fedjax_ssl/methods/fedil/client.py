"""Which pseudo-labels a client trusts: counts over its rounds (FedIL, eq. 14 to 21)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.ops.trees import row, with_rows


class Credibility(NamedTuple):
    """A client's memory of its examples."""

    label: jax.Array  # int32 [n_max], the label that is counted, or that of a member of the set
    # int32 [n_max], how often in a row it was predicted.
    count: jax.Array  # type: ignore[assignment]  # tuple.count is not used
    in_set: jax.Array  # bool [n_max], whether the example is in the pseudo-label set D^l


def advance(
    credibility: Credibility,
    positions: jax.Array,
    labels: jax.Array,
    credible: jax.Array,
    counts: jax.Array,
    successive: int,
) -> Credibility:
    """Counts the labels of a batch (eq. 17 to 21).

    The same label increases the count; another credible label restarts it at 1; a label that is not credible (confident
    and confirmed by the server's model, both factors of eq. 19) resets it to 0. At k, `successive`, the example joins
    the set, and its label no longer changes. The memory has leaves [n_max]; of the batch, `positions` and `labels` are
    int32 [B], `credible` and `counts`, whether an example is counted, are bool [B].
    """
    old = row(credibility, positions)
    same = (old.count > 0) & (old.label == labels)
    count = jnp.where(credible, jnp.where(same, old.count + 1, 1), 0)
    new = Credibility(labels, count, count >= successive)
    return with_rows(credibility, positions, new, counts & ~old.in_set)
