"""Decides which uploads are accepted: those that are finite and not far longer than the others."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.fields import is_on
from fedjax_ssl.engine.cohort import CohortResult
from fedjax_ssl.engine.interface import Broadcast
from fedjax_ssl.engine.untrusted.updates import changed_by, received_by_path
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import WITHOUT_PARAMETERS, all_finite, largest, norm, row_norms

LONGEST = 1000.0  # the largest accepted length of an update, in lower medians of the cohort's


def longest_update(config: Any) -> float:
    """The run's `longest` for `accepted_rows`. With privacy noise it is 0: no upload may affect another one."""
    return 0.0 if is_on(config.privacy.noise) else LONGEST


def accepted_rows(result: CohortResult, broadcast: Broadcast, longest: float) -> jax.Array:
    """Whether each row has an upload that is finite and not far longer than the others: bool [R].

    `longest` is the largest accepted length, in medians, see `too_long`; 0: any length. Raises a UserError if a
    method uploads nothing.
    """
    if not jax.tree.leaves(result.upload.model):
        raise UserError(WITHOUT_PARAMETERS)
    accepted = result.took_part & all_finite(result.upload, batch_ndim=1)
    if longest:
        accepted &= ~too_long(result.upload.model, broadcast, accepted, longest)
    return accepted


def too_long(sent: Model, broadcast: Broadcast, counted: jax.Array, times: float) -> jax.Array:
    """Whether each upload is far longer than the others. A client that sends 1e30 everywhere would dominate the mean.

    Lengths are Euclidean norms of an upload's change: of all parameters as one vector, and separately of all
    statistics. The bound is `times` the lower median of the uploads that count, bool [R], so that of two uploads it is
    the shorter one. If it is 0, because most uploads have not changed, the length of the broadcast replaces it. An
    upload whose change is no longer than the broadcast is never too long, however little the others have changed.
    """
    found = jnp.zeros(counted.shape, bool)
    for part in Model._fields:
        received, changes = received_by_path(broadcast, part), changed_by(getattr(sent, part), broadcast, part)
        if changes:
            # A change is at most twice the larger of the two numbers. To look for the largest change itself would make
            # XLA store all changes, as much memory as all uploads.
            most = largest(getattr(sent, part), 1)
            lengths = row_norms(changes, jnp.maximum(most, largest(received, 0)) if received else most)
            ranked = jnp.sort(jnp.where(counted, lengths, jnp.inf))
            median = ranked[jnp.maximum(jnp.sum(counted) - 1, 0) // 2]
            length = norm(received) if received else 0.0
            usual = jnp.where(median > 0, median, length)
            found |= (lengths > jnp.maximum(times * usual, length)) & (usual > 0)
    return found
