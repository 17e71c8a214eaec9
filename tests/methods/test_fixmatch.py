"""FixMatch: a step in which nothing counts, and a server in parallel, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import UserError
from fedjax_ssl.engine.interface import Received, State, Upload
from fedjax_ssl.methods import METHODS
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.run.validation import validate
from fedjax_ssl.server import SERVER_MODEL
from fedjax_ssl.server.aggregation import OPT_STATE
from tests.helpers.small_problem import federation, phases_of, sent_down, small_problem, train

THRESHOLD = 0.6
NO_LABELS = 0
EVAL, CONFIDENT = {"fixmatch.label_mode": "eval"}, {"fixmatch.loss_over": "confident"}
AT_CLIENTS = {"data.labels": "clients"}


@pytest.fixture(scope="module")
def data():
    return federation([[-1] * 7])


def build(**fields):
    problem = small_problem("fixmatch", **{"confidence.threshold": THRESHOLD, **fields})
    validate(problem.config)
    return problem, METHODS["fixmatch"].factory(problem)


def test_a_step_in_which_nothing_counts_changes_nothing(data):
    problem, method = build(**CONFIDENT, **{"confidence.threshold": 1.0})
    received = sent_down(problem)
    job, finished = train(phases_of(method)[0], received, data, NO_LABELS)
    assert job.num_steps == 6 and finished.metrics["confident_share"] == 0
    jax.tree.map(np.testing.assert_array_equal, finished.upload.model, received.model)
    # Over the batch it is a step: of weight decay, and of the statistics.
    _, method = build(**{"confidence.threshold": 1.0})
    _, finished = train(phases_of(method)[0], received, data, NO_LABELS)
    for found, before in zip(jax.tree.leaves(finished.upload.model), jax.tree.leaves(received.model)):
        assert np.all(found != before)


def test_a_label_counts_from_the_threshold_on(data):
    problem, method = build(**EVAL, **{"confidence.threshold": 0.5})
    received = sent_down(problem)
    two_classes = jnp.float32([0, 0, -1e9])  # probabilities of exactly 1/2, whatever the image
    params = {"backbone": {"bias": two_classes}, "classifier": {"kernel": jnp.zeros((4, 3))}}
    received = received._replace(model=Model(params, received.model.batch_stats), learning_rate=jnp.float32(0))
    _, finished = train(phases_of(method)[0], received, data, NO_LABELS)
    assert finished.metrics["confident_share"] == 1


def flat(tree):
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize("optimizer, momentum", [("fedavg", 0.0), ("fedavgm", 0.5)])
def test_a_server_in_parallel_has_half_the_weight_before_the_server_optimiser(data, optimizer, momentum):
    """v <- beta v + (w - mean), w <- w - v, the mean of the server's model and of the clients' mean, half and half."""
    problem, method = build(**{"fixmatch.server": "parallel", "aggregation.optimizer": optimizer})
    rng, key = np.random.default_rng(0), jax.random.key(0)
    noise = lambda tree, *axes: jax.tree.map(  # noqa: E731
        lambda leaf: jnp.float32(rng.normal(size=(*axes, *leaf.shape))), tree
    )
    shapes = jax.eval_shape(method.init, federation([[-1], [-1]], at_server=[0, 1, 2]), key).server
    assert shapes.keys() == {SERVER_MODEL, *([OPT_STATE] if momentum else [])}
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
        before, v = w, momentum * v + (w - means[0])
        w = w - v
        np.testing.assert_allclose(flat(state.model.params), w, atol=1e-5)
        np.testing.assert_allclose(flat(state.model.batch_stats), means[1], atol=1e-5)
        np.testing.assert_allclose(metrics["update_norm"], np.linalg.norm(w - before), rtol=1e-5)


def test_a_server_in_parallel_trains_a_model_of_its_own_before_the_round_and_none_after():
    problem, method = build(**{"fixmatch.server": "parallel"})
    data = federation([[-1], [-1]], at_server=[0, 1, 2, 1])
    first = sent_down(problem).model
    state, metrics = method.server_before(State(jnp.int32(0), first), data, jax.random.key(0))
    assert state.model is first
    assert metrics["server_loss"] > 0
    assert np.all(flat(state.server[SERVER_MODEL].params) != flat(first.params))
    assert method.server_after(state, data, None)[0] is state
    _, alternate = build()
    after, metrics = alternate.server_after(State(jnp.int32(0), first), data, jax.random.key(0))
    # The same training, of the global model itself.
    np.testing.assert_allclose(flat(after.model.params), flat(state.server[SERVER_MODEL].params), atol=1e-6)
    assert after.server == {}


def test_a_server_without_labels_trains_nothing_in_parallel():
    with pytest.raises(UserError, match=r"trains a server with labels, which has none here"):
        build(**{"fixmatch.server": "parallel", **AT_CLIENTS})


def test_a_server_in_parallel_has_no_use_for_parts_of_the_clients_own():
    with pytest.raises(UserError, match=r"is not for fixmatch.server='parallel', whose server has its own model"):
        build(**{"fixmatch.server": "parallel", "personal_parts": ("classifier",)})
