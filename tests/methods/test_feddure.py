"""FedDure's rates, which rise in each round anew."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.methods import METHODS
from tests.helpers.small_problem import federation, prepare, sent_down, small_problem


@pytest.mark.parametrize("persistent", [False, True])
def test_the_first_step_of_a_round_moves_nothing(persistent):
    """At a rate of 0, whatever an optimizer that lasts has counted in earlier rounds."""
    fields = {"client.persistent": persistent, "client.weight_decay": 0.0, "client.momentum": 0.0}
    problem = small_problem("feddure", **fields, **{"feddure.warm_up_steps": 10, "feddure.unlabelled_batch": 3})
    data = federation([[0, 1, -1, -1, 2]])
    method, received = METHODS["feddure"].factory(problem), sent_down(problem)
    state = jax.jit(method.init)(data, jax.random.key(0))
    assert bool(state.clients) == persistent
    own = jax.tree.map(lambda leaf: leaf[0] + 7 * (leaf.dtype == jnp.int32), state.clients)  # as after seven steps
    (phase,) = method.phases
    job = prepare(phase, received, data, 0, own)
    carry = jax.jit(phase.start)(received, data, job.work, {**own, **job.own})
    step = jax.jit(phase.step)
    params = []
    for index in range(2):
        carry = step(received, data, job.work, carry, jnp.int32(index), jax.random.key(index))
        params.append(np.asarray(carry.learner.model.params["classifier"]["kernel"]))
    np.testing.assert_array_equal(params[0], received.model.params["classifier"]["kernel"])
    assert np.abs(params[1] - params[0]).max() > 0
