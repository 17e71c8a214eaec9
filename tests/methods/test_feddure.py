"""FedDure: its rates, which rise in each round anew, and its fine regulator.

tests/official/feddure.py has whole rounds: the steps of all three models, or of two without the fine regulator.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.engine import CLASSIFIER
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.feddure import pair
from fedjax_ssl.methods.feddure.client import rising
from fedjax_ssl.ops.trees import select
from tests.helpers.small_problem import federation, phases_of, prepare, sent_down, small_problem


@pytest.mark.test_all
def test_rates_rise_in_each_round_anew():
    """From 0, whatever an optimizer that lasts has counted in earlier rounds."""
    fields = {"client.persistent": True, "client.weight_decay": 0.0, "client.momentum": 0.0}
    problem = small_problem("feddure", **fields, **{"feddure.warm_up_steps": 10})
    data = federation([[0, 1, -1, -1, 2]])
    method, received = METHODS["feddure"].factory(problem), sent_down(problem)
    state = jax.jit(method.init)(data, jax.random.key(0))
    own = jax.tree.map(lambda leaf: leaf[0] + 7 * (leaf.dtype == jnp.int32), state.clients)  # as after seven steps
    (phase,) = phases_of(method)
    job = prepare(phase, received, data, 0, own)
    learner = jax.jit(phase.start)(received, data, job.work, {**own, **job.own}).learner
    optimizer, slope = rising(problem)(0.4), select(received.model.params, CLASSIFIER)
    for expected in (0.0, 0.04):  # the lengths of steps, of a gradient that is not clipped
        updates, opt_state = optimizer.update(jax.tree.map(lambda g: g / 100, slope), learner.opt_state, slope)
        learner = learner._replace(opt_state=opt_state)
        for update, g in zip(jax.tree.leaves(updates), jax.tree.leaves(slope)):
            np.testing.assert_allclose(update, -expected * g / 100, atol=1e-7)


def test_the_fine_regulator_begins_as_torch_draws_its_linear_layers(monkeypatch):
    """Uniform within 1 / sqrt(fan-in)."""
    monkeypatch.setattr(pair, "HIDDEN", 400)
    regulator = pair.fresh_regulator(jax.random.key(0), 16)
    assert [regulator[name].shape for name in ("w1", "b1", "w2", "b2")] == [(16, 400), (400,), (400,), ()]
    for name, fan_in in (("w1", 16), ("b1", 16), ("w2", 400)):
        for end in (regulator[name].min(), regulator[name].max()):
            assert 0.97 < np.abs(end) * np.sqrt(fan_in) <= 1
    assert np.abs(regulator["b2"]) * 20 <= 1
