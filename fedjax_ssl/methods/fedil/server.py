"""The lengths of the global model's last changes: their average, and whether they have become small (FedIL)."""

import jax
import jax.numpy as jnp

from fedjax_ssl.engine.interface import State

INCREMENTS = "increments"  # the entry of `State.server`: float32 [n], the newest first; NaN for a round to come


def no_increments(rounds: int) -> dict[str, jax.Array]:
    """The entry before the first round, with room for so many rounds."""
    return {INCREMENTS: jnp.full(rounds, jnp.nan)}


def add_increment(state: State, after: State, length: jax.Array) -> State:
    """The state after a round, with the length of its change before those that `state` has."""
    increments = jnp.concatenate([length[None], state.server[INCREMENTS][:-1]])
    return after._replace(server={**after.server, INCREMENTS: increments})


def mean_increment(state: State, rounds: int) -> jax.Array:
    """The mean of the last lengths, of fewer in the first rounds: float32 []."""
    return jnp.nanmean(state.server[INCREMENTS][:rounds])


def stays_below(state: State, bound: float, rounds: int) -> jax.Array:
    """Whether all of the last lengths are below a bound: bool []; not before so many rounds."""
    return jnp.all(state.server[INCREMENTS][:rounds] < bound)  # NaN is below nothing
