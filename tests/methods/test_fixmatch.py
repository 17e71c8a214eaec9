"""FixMatch: a server in parallel, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import UserError
from fedjax_ssl.engine.interface import Received, State, Upload
from fedjax_ssl.methods import METHODS
from fedjax_ssl.run.validation import validate
from fedjax_ssl.server import SERVER_MODEL
from fedjax_ssl.server.aggregation import OPT_STATE
from tests.helpers.small_problem import federation, sent_down, small_problem


@pytest.fixture(scope="module")
def data():
    return federation([[-1] * 7])


def build(**fields):
    problem = small_problem("fixmatch", **{"confidence.threshold": 0.6, **fields})
    validate(problem.config)
    return problem, METHODS["fixmatch"].factory(problem)


def flat(tree):
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def test_a_server_in_parallel_has_half_the_weight_before_the_server_optimiser(data):
    """v <- beta v + (w - mean), w <- w - v, the mean of the server's model and of the clients' mean, half and half."""
    problem, method = build(**{"fixmatch.server": "parallel", "aggregation.optimizer": "fedavgm"})
    rng, key = np.random.default_rng(0), jax.random.key(0)
    noise = lambda tree, *axes: jax.tree.map(  # noqa: E731
        lambda leaf: jnp.float32(rng.normal(size=(*axes, *leaf.shape))), tree
    )
    shapes = jax.eval_shape(method.init, federation([[-1], [-1]], at_server=[0, 1, 2]), key).server
    assert shapes.keys() == {SERVER_MODEL, OPT_STATE}
    memory = {name: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), entry) for name, entry in shapes.items()}
    state = State(jnp.int32(0), sent_down(problem).model, memory)
    sizes, w, v = jnp.array([30, 99, 10]), flat(state.model.params), 0.0
    for accepted in ([True, False, True], [False, False, False], [True, True, True]):
        own, uploads = noise(state.model), noise(state.model, 3)
        state = state._replace(server={**state.server, SERVER_MODEL: own})
        received = Received(Upload(uploads), jnp.array(accepted), jnp.arange(3), None, sizes, sizes)
        state, metrics = method.aggregate(state, data, received, key)

        weights = np.where(accepted, sizes, 0) / max(np.sum(np.where(accepted, sizes, 0)), 1)
        half = 0.5 if any(accepted) else 0.0
        means = []
        for part in (0, 1):
            rows = np.stack([flat(jax.tree.map(lambda leaf, m=m: leaf[m], uploads[part])) for m in range(3)])
            means.append(half * weights @ rows + (1 - half) * flat(own[part]))
        before, v = w, 0.5 * v + (w - means[0])
        w = w - v
        np.testing.assert_allclose(flat(state.model.params), w, atol=1e-5)
        np.testing.assert_allclose(flat(state.model.batch_stats), means[1], atol=1e-5)
        np.testing.assert_allclose(metrics["update_norm"], np.linalg.norm(w - before), rtol=1e-5)


@pytest.mark.parametrize(("fields", "line"), [
    ({"data.labels": "clients"}, r"trains a server with labels, which has none here"),
    ({"personal_parts": ("classifier",)}, r"is not for fixmatch.server='parallel', whose server has its own model"),
])  # fmt: skip
def test_what_a_server_in_parallel_cannot_have_is_refused(fields, line):
    with pytest.raises(UserError, match=line):
        build(**{"fixmatch.server": "parallel", **fields})
