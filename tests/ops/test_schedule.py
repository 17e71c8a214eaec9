"""The learning rates of rounds, against plain loops and PyTorch's names for them."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.ops.schedule import learning_rate_at

RATE, ROUNDS = 0.3, 12


def by_hand(schedule="constant", warm_up_rounds=0, drop_rounds=()):
    rates = []
    for t in range(ROUNDS):
        rate = RATE
        for boundary in drop_rounds:  # MultiStepLR with gamma 0.1
            rate *= 0.1 if t >= boundary else 1
        if t < warm_up_rounds:
            rate *= (t + 1) / warm_up_rounds
        elif schedule == "cosine":
            rate *= (1 + math.cos(math.pi * (t - warm_up_rounds) / (ROUNDS - warm_up_rounds))) / 2
        rates.append(rate)
    return rates


@pytest.mark.parametrize("fields", [
    {},
    {"schedule": "cosine"},
    {"warm_up_rounds": 4},
    {"schedule": "cosine", "warm_up_rounds": 3},
    {"drop_rounds": (2, 7)},
    {"warm_up_rounds": 2, "drop_rounds": (6,)},
])  # fmt: skip
def test_the_rates_of_all_rounds(fields):
    """The number of rounds and the rate are arguments of the program, as in a run."""
    given = {"schedule": "constant", "warm_up_rounds": 0, "drop_rounds": (), **fields}

    @jax.jit
    def rates(rate, num_rounds):
        config = types.SimpleNamespace(**given, num_rounds=num_rounds)
        return jax.vmap(lambda t: learning_rate_at(config, rate, t))(jnp.arange(ROUNDS))

    np.testing.assert_allclose(rates(RATE, ROUNDS), by_hand(**fields), rtol=1e-5, atol=1e-7)
