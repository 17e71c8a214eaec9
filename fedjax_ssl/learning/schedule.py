"""The learning rate of a round."""

import jax
import jax.numpy as jnp

SCHEDULES = ("constant", "cosine")


def learning_rate_at(config, rate: float, round_number: jax.Array) -> jax.Array:
    """The learning rate during one round, constant inside it.

    Args:
        config: `schedule` is 'constant', or 'cosine': rate (1 + cos(pi t / T)) / 2 in round t of T = num_rounds.
        rate: of round 0.
        round_number: int32 [], from 0.

    Returns:
        float32 [].
    """
    if config.schedule == "constant":
        return jnp.float32(rate)
    return rate * 0.5 * (1 + jnp.cos(jnp.pi * round_number / config.num_rounds))
