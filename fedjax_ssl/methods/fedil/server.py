"""The norms of the global model's last changes: their mean, and whether they have become small (FedIL)."""

import jax
import jax.numpy as jnp

from fedjax_ssl.engine.interface import State

INCREMENTS = "increments"  # the entry of `State.server`: float32 [n], newest first; NaN for future rounds


def no_increments(rounds: int) -> dict[str, jax.Array]:
    """The entry before the first round, with room for this many rounds."""
    return {INCREMENTS: jnp.full(rounds, jnp.nan)}


def add_increment(state: State, after: State, length: jax.Array) -> State:
    """Adds the norm of a round's change to the norms in `state`."""
    increments = jnp.concatenate([length[None], state.server[INCREMENTS][:-1]])
    return after._replace(server={**after.server, INCREMENTS: increments})


def mean_increment(state: State, rounds: int) -> jax.Array:
    """The mean of the last norms, of fewer in the first rounds: float32 []."""
    return jnp.nanmean(state.server[INCREMENTS][:rounds])


def stays_below(state: State, bound: float, rounds: int) -> jax.Array:
    """Whether all of the last norms are below a bound: bool []; False before this many rounds."""
    return jnp.all(state.server[INCREMENTS][:rounds] < bound)  # comparisons with NaN are False
