"""Which uploads are accepted: those that are finite and not far longer than the others."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.engine.cohort import CohortResult
from fedjax_ssl.engine.updates import changed_by, received_by_path
from fedjax_ssl.errors import UserError
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.learning.trees import WITHOUT_PARAMETERS, all_finite, norm, row_norms


def longest_update(config: Any) -> float:
    """`longest` of `accepted_rows` in a run. It is 0 with noise, since an upload must not decide about another one."""
    return 0.0 if config.privacy.noise else config.aggregation.longest_update


def accepted_rows(result: CohortResult, broadcast: Any, longest: float) -> jax.Array:
    """Which rows have an upload that is finite in every number and not far longer than the others.

    Args:
        result: of the cohort.
        broadcast: the broadcast.
        longest: the largest accepted length, in medians, see `too_long`; 0: any length.

    Returns:
        bool [R].

    Raises:
        UserError: nothing is uploaded.
    """
    if not jax.tree.leaves(result.upload.model):
        raise UserError(WITHOUT_PARAMETERS)
    accepted = result.took_part & all_finite(result.upload, batch_ndim=1)
    if longest:
        accepted &= ~too_long(result.upload.model, broadcast, accepted, longest)
    return accepted


def too_long(sent: Model, broadcast: Any, counted: jax.Array, times: float) -> jax.Array:
    """Which uploads are far longer than the others. Otherwise a client that sends 1e30 everywhere would be the mean.

    Lengths are Euclidean: of an upload's change of all parameters as one vector, and separately of all statistics. The
    median is the lower one over all uploads that count, so that it is never the longer of two. If it is 0, since most
    have not moved, the length of the broadcast replaces it. An upload that changes no more than this length is never
    too long, however little the others have moved.

    Args:
        sent: leaves [R, ...].
        broadcast: the broadcast; parts that are missing in its model count as 0.
        counted: bool [R], the uploads over which the median is taken.
        times: the largest length, in medians.

    Returns:
        bool [R].
    """
    found = jnp.zeros(counted.shape, bool)
    for part in Model._fields:
        changes = changed_by(getattr(sent, part), broadcast, part)
        if changes:
            lengths = row_norms(changes)
            ranked = jnp.sort(jnp.where(counted, lengths, jnp.inf))
            median = ranked[jnp.maximum(jnp.sum(counted) - 1, 0) // 2]
            received = received_by_path(broadcast, part)
            length = norm(received) if received else 0.0
            usual = jnp.where(median > 0, median, length)
            found |= (lengths > jnp.maximum(times * usual, length)) & (usual > 0)
    return found
