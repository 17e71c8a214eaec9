"""The learning rate of a round."""

import jax
import jax.numpy as jnp
import optax

LEAST = 1e-5  # the lower bound of the tail 'seven_sixteenths'


def learning_rate_at(config, rate: float, round_number: jax.Array) -> jax.Array:
    """The learning rate of one round, float32 []; it is constant within the round. `rate` is that of round 0.

    In round t, from 0, of T = num_rounds, of which W = warm_up_rounds come first, it is rate (t + 1) / W for t < W;
    then `rate`, if `config.schedule` is 'constant', or rate (1 + cos(pi (t - W) / (T - W))) / 2, if it is 'cosine'. And
    a tenth of it after each of `config.drop_rounds` that is done.
    """
    rate = optax.piecewise_constant_schedule(rate, dict.fromkeys(config.drop_rounds, 0.1))(round_number)
    if config.schedule == "cosine":
        return warmed_up(rate, round_number, config.warm_up_rounds, config.num_rounds)
    if config.warm_up_rounds:
        rate = rate * jnp.minimum((round_number + 1) / config.warm_up_rounds, 1)
    return jnp.float32(rate)


def warmed_up(rate: float, round_number: jax.Array, warm_up: int, total: int, tail: str = "half") -> jax.Array:
    """The learning rate of round t, from 0, float32 []: it rises to `rate` in W equal steps, then falls by a cosine.

        rate (t + 1) / W                  for t < W
        rate (1 + cos(pi s)) / 2          after that, with s = (t - W) / (T - W): 'half' (SimCLR, Chen et al., 2020)
        rate max(cos(7 pi s / 16), 1e-5)  'seven_sixteenths' (FixMatch, Sohn et al., 2020; the bound is FedRGD's)

    W is `warm_up`, T is `total`, more than W; the fall is named by `tail`.
    """
    share = jnp.maximum(round_number - warm_up, 0) / jnp.maximum(total - warm_up, 1)
    if tail == "half":
        falling = 0.5 * (1 + jnp.cos(jnp.pi * share))
    else:
        falling = jnp.maximum(jnp.cos(7 * jnp.pi / 16 * share), LEAST)
    return rate * jnp.where(round_number < warm_up, (round_number + 1) / max(warm_up, 1), falling)
