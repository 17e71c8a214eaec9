"""Many rounds as one program: when it ends."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.engine.dispatch import make_dispatch
from fedjax_ssl.engine.round import make_round
from fedjax_ssl.ops.sgd import Model
from tests.helpers.toy_federation import TRUTH, federation, problem, toy_method, toy_state


def test_a_dispatch_ends_early():
    """After the rounds that were asked for, or at an unhealthy one."""
    counted = toy_method(
        aggregate=lambda state, data, received, key: (
            state._replace(model=Model({"classifier": state.model.params["classifier"] + 1}, {})), {}
        ),
        broadcast=lambda state, data, key: toy_method().broadcast(
            state._replace(server={"fails": jnp.full(2, state.round == state.server["fails_in"])}), data, key
        ),
    )  # fmt: skip
    dispatch = jax.jit(make_dispatch(make_round(problem(), counted, lanes=2), capacity=6))
    for num_rounds, fails_in, done, healthy in (
        (4, 9, 4, True),
        (6, 2, 3, False),
        (0, 9, 0, True),
        (8, 9, 6, True),  # no more than its results have room for
    ):
        server = {"draw": jnp.array([0, 4]), "fails_in": jnp.int32(fails_in)}
        found = dispatch(toy_state(**server), federation(), jnp.array(TRUTH), num_rounds)
        assert (found.rounds_done, found.state.round, bool(found.healthy)) == (done, done, healthy)
        np.testing.assert_array_equal(found.results.metrics["round"], [*range(1, done + 1)] + [0] * (6 - done))
