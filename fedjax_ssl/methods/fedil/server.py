"""The norms of the global model's last changes, and their mean (FedIL, Figure 4)."""

import jax
import jax.numpy as jnp

from fedjax_ssl.engine.interface import State

INCREMENTS = "increments"  # the entry of `State.server`: float32 [n], newest first; NaN for future rounds
AVERAGE_ROUNDS = 20  # rounds in the moving average


def no_increments() -> dict[str, jax.Array]:
    """The entry before the first round."""
    return {INCREMENTS: jnp.full(AVERAGE_ROUNDS, jnp.nan)}


def add_increment(state: State, after: State, length: jax.Array) -> State:
    """Adds the norm of a round's change to the norms in `state`."""
    increments = jnp.concatenate([length[None], state.server[INCREMENTS][:-1]])
    return after._replace(server={**after.server, INCREMENTS: increments})


def mean_increment(state: State) -> jax.Array:
    """The mean of the last norms, of fewer in the first rounds: float32 []."""
    return jnp.nanmean(state.server[INCREMENTS])
