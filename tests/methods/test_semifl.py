"""SemiFL: the draws of its mixtures; tests/official has whole rounds."""

import jax
import jax.numpy as jnp
import pytest

from fedjax_ssl.methods import METHODS
from tests.helpers.small_problem import federation, phases_of, prepare, sent_down, small_problem


@pytest.fixture(scope="module")
def data():
    return federation([[-1] * 7], at_server=[0, 1])


def test_lambda_s_distribution_is_that_of_the_paper(data, monkeypatch):
    alphas = []
    note = lambda key, a: alphas.append(a) or jnp.float32(0.3)  # noqa: E731
    monkeypatch.setattr("fedjax_ssl.ops.augment.mixup.sample_lambda", note)
    problem = small_problem("semifl")
    received, (phase,) = sent_down(problem), phases_of(METHODS["semifl"].factory(problem))

    def step():
        job = prepare(phase, received, data, 0)
        carry = phase.start(received, data, job.work, {})
        return phase.step(received, data, job.work, carry, jnp.int32(0), jax.random.key(0))

    jax.eval_shape(step)
    assert set(alphas) == {0.75}  # of eq. 6
