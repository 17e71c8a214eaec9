"""FedCon: the clients' own projectors, its views, rate and configuration; tests/official/fedcon.py has whole rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.engine.interface import State
from fedjax_ssl.methods import METHODS
from fedjax_ssl.ops.schedule import warmed_up
from tests.helpers.small_problem import PIXELS, federation, small_problem


@pytest.fixture(scope="module")
def data():
    return federation([[-1] * 2, [-1] * 7], at_server=[0, 1, 2, 0, 1])


def build(**fields):
    problem = small_problem("fedcon", **fields)
    return problem, METHODS["fedcon"].factory(problem)


def test_projectors_are_the_clients_own(data):
    """Each begins with another one, beside the global model."""
    problem, method = build()
    state = jax.jit(method.init)(data, jax.random.key(0))
    kernels = np.asarray(state.clients["projector"]["first"]["kernel"])
    assert kernels.shape == (problem.config.num_clients, PIXELS, 3 * PIXELS)
    assert len({kernel.tobytes() for kernel in kernels}) == len(kernels)


def test_nobody_sees_a_strong_view(data):
    """Not even the training before the first round, which is that of all methods."""

    def refused(key, images):
        raise AssertionError("a strong view")

    problem = small_problem("fedcon", strong=refused, **{"server.pretrain_epochs": 1})
    method = METHODS["fedcon"].factory(problem)
    state = jax.eval_shape(method.init, data, jax.random.key(0))
    jax.eval_shape(method.server_after, state, data, jax.random.key(0))


def test_a_rate_rises_and_falls():
    """SimCLR's, and FixMatch's, which ends at a fifth; FedRGD's bound is reached where the cosine is negative."""
    rates = [float(warmed_up(0.3, jnp.int32(t), 3, 11)) for t in range(12)]
    expected = [0.1, 0.2, 0.3, *(0.15 * (1 + np.cos(np.pi * s / 8)) for s in range(9))]
    np.testing.assert_allclose(rates, expected, atol=1e-7)
    rates = [float(warmed_up(0.3, jnp.int32(t), 0, 4, "seven_sixteenths")) for t in range(7)]
    np.testing.assert_allclose(rates, [0.3 * max(np.cos(7 * np.pi * t / 64), 1e-5) for t in range(7)], rtol=1e-5)
    problem, method = build(**{"fedcon.client_schedule": "warm_up", "num_rounds": 40, "schedule": "cosine"})
    state = State(jnp.int32(4), problem.network.init(jax.random.key(0)))
    assert float(method.broadcast(state, None, None).learning_rate) == pytest.approx(0.2)  # half of 0.4
    problem, method = build(num_rounds=8, schedule="cosine")
    assert float(method.broadcast(state, None, None).learning_rate) == pytest.approx(0.2)
