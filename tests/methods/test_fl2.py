"""(FL)^2 against NumPy: a client's thresholds, ASAM's perturbation, a step's losses, weights by learning status."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.engine.interface import Received, State, Upload
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.fl2 import perturbation
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.run.validation import validate
from tests.helpers.consistency_by_hand import batches
from tests.helpers.linear_network import at_rest, in_numpy, sgd_step
from tests.helpers.small_problem import (
    CLASSES,
    assert_model,
    federation,
    loss_and_gradient,
    mirrored,
    negative,
    phases_of,
    pixels_of,
    predicted,
    prepare,
    running_mean,
    sent_down,
    small_problem,
    statistics_of,
    train,
)

CLIENT, SIZE = 1, 10


@pytest.fixture(scope="module")
def data():
    return federation([[-1] * 2, [-1] * SIZE, [-1] * 4], at_server=[0, 1, 2])


def build(**fields):
    problem = small_problem("fl2", **{"confidence.threshold": 0.75, **fields})
    validate(problem.config)
    return problem, METHODS["fl2"].factory(problem)


# --- The perturbation. -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tree():
    """Parameters with a kernel, a normalisation's scale and two biases, and gradients of them."""
    rng = np.random.default_rng(3)
    shapes = {"conv": {"kernel": (3, 3, 2), "bias0": (2,)}, "norm": {"scale": (2,), "bias": (2,)}}
    draw = lambda: {name: {leaf: rng.normal(size=s) for leaf, s in of.items()} for name, of in shapes.items()}  # noqa: E731
    return draw(), draw()


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_perturbation_is_that_of_numpy(tree, adaptive):
    """T_v = |v| + 0.01 for weights and scales, 1 for biases; one length for all tensors."""
    params, gradients = tree
    found = jax.jit(lambda *t: perturbation(*t, 0.3, adaptive))(*jax.tree.map(np.float32, tree))
    scales = {
        layer: {leaf: np.abs(v) + 0.01 if adaptive and leaf in ("kernel", "scale") else 1.0 for leaf, v in of.items()}
        for layer, of in params.items()
    }
    length = np.sqrt(
        sum(np.sum((scales[layer][leaf] * g) ** 2) for layer, of in gradients.items() for leaf, g in of.items())
    )
    for layer, of in gradients.items():
        for leaf, g in of.items():
            np.testing.assert_allclose(found[layer][leaf], 0.3 * scales[layer][leaf] ** 2 * g / length, rtol=1e-5)
    moved = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(found)))
    assert (moved == pytest.approx(0.3)) == (not adaptive)  # with all T = 1 its length is rho


def test_nothing_is_perturbed_by_gradients_of_zero(tree):
    params, gradients = jax.tree.map(np.float32, tree)
    of = jax.jit(perturbation)
    for radius in (0.3, 1e30):
        moved = of(params, jax.tree.map(np.zeros_like, gradients), radius)
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(moved))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(of(params, gradients, 0.0)))


# --- A client. -------------------------------------------------------------------------------------------------------


def labels_by_hand(problem, data, received, client=CLIENT):
    """CAT in float64: labels, which images count, which are the surest, tau_k."""
    size, tau_f = int(data.client_size[client]), problem.config.confidence.threshold
    x = pixels_of(data, np.asarray(data.client_index[client])[:size], mirrored)
    p = predicted(received.model, x)
    tau, mean = p.max(axis=1).mean(), p.mean(axis=0)
    by_class = tau * mean / mean.max()
    if problem.config.confidence.kind == "fixed":
        by_class = np.full(CLASSES, tau_f)
    labels = p.argmax(axis=1)
    return labels, p.max(axis=1) > by_class[labels], p.max(axis=1) > tau_f, tau


def train_by_hand(problem, data, received, work):
    """L_a alone, an unpadded loop; tests/official has L_cs."""
    config, rows = problem.config.client, np.asarray(work.decks["unlabelled"].rows)
    labels, counts, *_ = labels_by_hand(problem, data, received)
    model, statistics = in_numpy(received.model.params), statistics_of(received.model)
    velocity, losses = at_rest(model), []
    for batch in batches(np.asarray(work.decks["unlabelled"].order), int(counts.sum()), config.batch_size):
        x = pixels_of(data, rows[batch], negative)
        loss, gradient = loss_and_gradient(model, x, x.mean(axis=0), np.eye(CLASSES)[labels[batch]] / len(batch))
        model, velocity = sgd_step(model, gradient, velocity, config, config.learning_rate)
        statistics = running_mean(statistics, x)
        losses.append(loss)
    return model, statistics, np.mean(losses)


def test_a_client_without_sacr_and_cat_trains_as_by_hand(data):
    fixed = {"fl2.consistency_weight": 0.0, "confidence.kind": "fixed", "confidence.threshold": 0.62}
    problem, method = build(**fixed)
    received = sent_down(problem)
    job, finished = train(phases_of(method)[0], received, data, CLIENT, jit=True)
    labels, counts, surest, tau = labels_by_hand(problem, data, received)
    np.testing.assert_array_equal(job.work.labels.report.labels, labels)
    np.testing.assert_array_equal(job.work.labels.report.qualified, counts)
    assert 0 < sum(surest & counts) <= sum(counts) < SIZE  # each set has something to say
    assert float(finished.upload.metadata["status"]) == pytest.approx(tau, rel=1e-5)
    model, statistics, loss = train_by_hand(problem, data, received, job.work)
    assert_model(finished.upload.model, model, statistics)
    np.testing.assert_allclose(finished.metrics["adaptive_loss"], loss, atol=1e-5)
    assert "consistency_loss" not in finished.metrics


def test_if_nobody_is_sure_it_is_fixmatch_with_adaptive_thresholds(data):
    """w* is w, L_cs is 0 and has no gradient: the client trains as by hand without it."""
    problem, method = build(**{"confidence.threshold": 1.0})
    received = sent_down(problem)
    job, finished = train(phases_of(method)[0], received, data, CLIENT, jit=True)
    assert float(finished.metrics["consistency_loss"]) == pytest.approx(0, abs=1e-6)
    model, statistics, _ = train_by_hand(build(**{"fl2.consistency_weight": 0.0})[0], data, received, job.work)
    assert_model(finished.upload.model, model, statistics)


def test_a_confidence_at_the_threshold_does_not_count(data):
    """All predictions are 1/2: the mean is that of each."""
    problem, method = build(**{"confidence.threshold": 0.5})
    params = {"backbone": {"bias": jnp.float32([0, 0, -1e9])}, "classifier": {"kernel": jnp.zeros((4, 3))}}
    received = sent_down(problem)._replace(model=Model(params, sent_down(problem).model.batch_stats))
    job = prepare(phases_of(method)[0], received, data, CLIENT)
    assert not np.any(job.work.labels.report.qualified) and job.work.decks["unlabelled"].size == 0
    assert not np.any(job.work.labels.more)


# --- Aggregation. ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "expected", "by_status"),
    [
        ([1.0, 1.0, 1.0, 0.2], np.array([1, 1, 1, 0]) / 3, True),  # the last one's upload was dropped
        ([0.5, 0.9, 0.8, 0.2], np.array([2, 10, 4, 0]) / 16, False),
    ],
)
def test_certain_clients_weigh_the_same(data, status, expected, by_status):
    """Without LSAA by size."""
    problem, method = build(**{"aggregation.weights": "size", "fl2.status_weights": by_status})
    state = State(jnp.int32(0), sent_down(problem).model)
    rng, accepted = np.random.default_rng(0), np.array([True, True, True, False])
    uploads = jax.tree.map(lambda leaf: rng.normal(size=(4, *leaf.shape)).astype(np.float32), state.model)
    told, sizes = {"status": jnp.float32(status)}, jnp.int32([2, 10, 4, 0])
    received = Received(Upload(uploads, told), jnp.array(accepted), jnp.arange(4), None, sizes, sizes)
    after, _ = method.aggregate(state, data, received, jax.random.key(0))
    for found, leaf in zip(jax.tree.leaves(after.model), jax.tree.leaves(uploads)):
        np.testing.assert_allclose(found, np.tensordot(expected, np.asarray(leaf), 1), atol=1e-6)
