"""FedMatch against NumPy, written from its equations: server training, messages, helpers, lost uploads.

tests/official/fedmatch.py has whole rounds with labels at clients and at the server.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.engine.interface import Received, Upload
from fedjax_ssl.methods.fedmatch import PARTS, UPLOADS, VECTORS
from fedjax_ssl.methods.fedmatch.phases import PLATEAU, PSI, SIGMA, Plateau
from fedjax_ssl.methods.fedmatch.server import Vectors, nearest_clients, noise_image
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.server import CLASSIFICATION
from tests.helpers.fedmatch_by_hand import ENTRIES, KEY, build, numbers, random_params
from tests.helpers.linear_network import at_rest, in_numpy, sgd_step
from tests.helpers.small_problem import (
    CLASSES,
    NUM_CLIENTS,
    PIXELS,
    federation,
    itself,
    loss_and_gradient,
    pixels_of,
    probabilities,
)

# --- The server. -----------------------------------------------------------------------------------------------------


def stepped(parts, data, anchors, config, rate):
    """The loss of a first step on all anchors, and sigma after it; lambda_s is 10."""
    sigma, psi = (in_numpy(parts[name]) for name in (SIGMA, PSI))
    theta, x = {name: sigma[name] + psi[name] for name in psi}, pixels_of(data, range(len(anchors)))
    loss, gradient = loss_and_gradient(theta, x, x.mean(axis=0), np.eye(CLASSES)[anchors] / len(anchors))
    gradient = {name: 10 * leaf for name, leaf in gradient.items()}
    return loss, sgd_step(sigma, gradient, at_rest(sigma), config, rate)[0]


def test_a_server_with_labels_trains_sigma_alone():
    """One step on all anchors in round 4 of 8; then a lower rate, for no loss is below the lowest."""
    problem, method = build("server", weak=itself, patience=1)
    problem.config.update({"schedule": "cosine", "num_rounds": 8})
    config = problem.config.server
    config.update({"epochs": 1, "batch_size": 4, "augmentation": "weak", "learning_rate": 0.2, "clip_norm": 0.0})
    anchors = [0, 1, 2, 2]
    data = federation([[-1] * 3], anchors)
    state = method.init(data, KEY)
    lowest = Plateau(jnp.float32(0.5), jnp.float32(0.0), jnp.int32(0))
    state = state._replace(round=jnp.int32(4), server={**state.server, PLATEAU: lowest})
    after, metrics = method.server_before(state, data, KEY)
    psi = in_numpy(state.server[PARTS][PSI])
    loss, expected = stepped(state.server[PARTS], data, anchors, config, 0.05)  # half of half the rate
    np.testing.assert_allclose(metrics["server_loss"], loss, rtol=1e-5)
    found = in_numpy(after.server[PARTS][SIGMA])
    for name in psi:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5)
        np.testing.assert_array_equal(in_numpy(after.server[PARTS][PSI])[name], psi[name])
        np.testing.assert_allclose(in_numpy(after.model.params)[name], expected[name] + psi[name], atol=1e-4)
    np.testing.assert_allclose(after.server[PLATEAU], [0.5 / 3, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("lasts", [True, False])
def test_the_optimizer_of_pre_training_may_last(lasts):
    """It trains sigma at a rate of its own."""
    problem, method = build("server", weak=itself)
    config, data = problem.config.server, federation([[-1] * 3], at_server=[0, 1, 2, 2])
    config.update({"batch_size": 4, "momentum": 0.5, "persistent": True, "pretrain_persistent": lasts})
    config.update({"pretrain_learning_rate": 0.2, "learning_rate": 0.3})
    fresh = method.init(data, KEY)
    config.pretrain_epochs = 1
    state = method.init(data, KEY)
    assert np.any(numbers(state.server[CLASSIFICATION])) == lasts
    _, expected = stepped(fresh.server[PARTS], data, [0, 1, 2, 2], config, 0.2)
    for name, leaf in in_numpy(state.server[PARTS][SIGMA]).items():
        np.testing.assert_allclose(leaf, expected[name], atol=1e-5)


def test_an_upload_that_is_lost_is_not_remembered():
    """Nor is it in the mean. With labels at the server the clients send psi alone; sigma is the server's."""
    problem, method = build("server", smallest=0.2)
    data = federation([[-1] * 3, [-1] * 2, [-1], [-1]], at_server=[0])
    state = method.init(data, KEY)
    sent = [random_params(problem, 10 * seed) for seed in range(3)]
    statistics = {"mean": jnp.array([[0.1] * PIXELS, [0.9] * PIXELS, [0.3] * PIXELS])}
    params = {PSI: jax.tree.map(lambda *leaves: jnp.stack(leaves), *sent)}
    uploads, sizes = Upload(Model(params, statistics), {"entries": jnp.ones(3)}), jnp.array([1, 2, 3])
    received = Received(uploads, jnp.array([True, False, True]), jnp.array([2, 1, 0]), None, sizes, sizes)
    after, _ = jax.jit(method.aggregate)(state, data, received, KEY)
    mean = (numbers(sent[0]) + numbers(sent[2])) / 2
    np.testing.assert_allclose(numbers(after.server[PARTS][PSI]), mean, rtol=1e-5)
    np.testing.assert_array_equal(numbers(after.server[PARTS][SIGMA]), numbers(state.server[PARTS][SIGMA]))
    vectors, records = after.server[VECTORS], after.records[UPLOADS]
    np.testing.assert_array_equal(vectors.seen, [True, False, True, False])
    pixels = np.asarray(noise_image((2, 2, 1)), np.float64).reshape(1, PIXELS) / 255
    for client, row in ((2, 0), (0, 2)):
        sigma, psi = in_numpy(state.server[PARTS][SIGMA]), in_numpy(sent[row])
        theta = {name: sigma[name] + psi[name] for name in psi}
        expected = probabilities(theta, pixels, np.asarray(statistics["mean"][row], np.float64))[0]
        np.testing.assert_allclose(vectors.outputs[client], expected, atol=1e-5)
        held = jax.tree.map(lambda leaf, client=client: leaf[client], records[PSI])
        np.testing.assert_array_equal(numbers(held), numbers(sent[row]))
    assert not numbers(jax.tree.map(lambda leaf: leaf[1], records)).any()


# --- Helpers and messages. -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("round_number", "sparse_down"), [(9, True), (8, False)])
def test_what_travels_down_is_counted_entry_by_entry(round_number, sparse_down):
    """In round 9 client 1 gets the psi of clients 3 and 2; client 0 has never uploaded and gets both parts whole."""
    problem, method = build("clients", smallest=0.2, least_change=0.3, sparse_down=sparse_down)
    data = federation([[0, -1]] * NUM_CLIENTS)
    state = method.init(data, KEY)._replace(round=jnp.int32(round_number))
    names = (SIGMA, PSI) if sparse_down else (PSI,)
    held = [
        {name: random_params(problem, 100 + 10 * client + len(name)) for name in names} for client in range(NUM_CLIENTS)
    ]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *held)
    vectors = jnp.array([[0.0, 0, 1], [0.2, 0.3, 0.5], [0.9, 0, 0.1], [0.2, 0.4, 0.4]])
    vectors = Vectors(vectors, jnp.array([False, True, True, True]))
    state = state._replace(server={**state.server, VECTORS: vectors}, records={UPLOADS: params})
    clients = jnp.array([1, 0])
    # Who is looked up is said beforehand, so that these rows can be fetched.
    helpers_of_1 = [3, 2] if round_number == 9 else [-1, -1]
    np.testing.assert_array_equal(method.recalls(state, clients), [helpers_of_1, [-1, -1]])
    sent = method.broadcast(state, None, None)
    message = jax.jit(method.personal)(state, data, clients, KEY)
    assert bool(sent.extra) == (round_number == 9)
    np.testing.assert_array_equal(message["present"], [[round_number == 9] * 2, [False] * 2])

    cut_off = lambda x: np.where(np.abs(x) <= 0.2, 0, x)  # noqa: E731
    parts = {name: numbers(state.server[PARTS][name]) for name in (SIGMA, PSI)}
    entries = ENTRIES
    if sparse_down:
        entries = np.sum(np.abs(parts[SIGMA] - numbers(held[1][SIGMA])) > 0.3)
        entries += np.sum(np.abs(cut_off(parts[PSI]) - cut_off(numbers(held[1][PSI]))) > 0.3)
        assert 0 < entries < ENTRIES
    if round_number == 9:
        own = cut_off(numbers(held[1][PSI]))
        for helper in (3, 2):
            psi = cut_off(numbers(held[helper][PSI]))
            entries += np.sum((psi != 0) & (np.abs(psi - own) > 0.3))
    np.testing.assert_array_equal(message["entries"], [entries, ENTRIES])
    one = jax.tree.map(lambda leaf: leaf[0], message)
    others = 4 + 4 * PIXELS  # the learning rate, and the running mean
    assert method.wire_bytes.down(sent, one) == 4 * entries + others
    upload = Upload(Model({}, sent.model.batch_stats), {"entries": jnp.float32(7)})
    assert method.wire_bytes.up(upload) == 4 * 7 + 4 * PIXELS


def test_without_helpers_nothing_but_a_count_is_personal():
    _, method = build("clients", helpers=0)
    data = federation([[0, -1]] * NUM_CLIENTS)
    state = method.init(data, KEY)
    assert set(jax.jit(method.personal)(state, data, jnp.array([1, 0]), KEY)) == {"entries"}
    assert method.recalls is None


def test_the_noise_is_one_image():
    noise = np.asarray(noise_image((32, 32, 3)))
    assert noise.shape == (1, 32, 32, 3) and noise.min() >= 0 and noise.max() <= 255
    np.testing.assert_array_equal(noise, noise_image((32, 32, 3)))
    # A normal distribution of mean and deviation 125 between -1 and 1.04 deviations.
    np.testing.assert_allclose([noise.mean(), noise.std()], [127.1, 68.1], atol=3)


def test_helpers_are_the_nearest_clients():
    """Of 0 the equally distant 1 and 3, in their order; client 5 has not been seen."""
    outputs = jnp.array([[0.0, 0], [1, 0], [0, 3], [0, 1], [9, 9], [0, 0.5]])
    vectors = Vectors(outputs, jnp.array([True] * 5 + [False]))
    find = jax.jit(nearest_clients, static_argnums=2)
    near, present = find(vectors, jnp.array([0, 2, 5, 4]), 2)
    np.testing.assert_array_equal(np.asarray(near)[[0, 1, 3]], [[1, 3], [3, 0], [2, 1]])
    np.testing.assert_array_equal(present, [[True] * 2, [True] * 2, [False] * 2, [True] * 2])
    few = vectors._replace(seen=jnp.array([True, True] + [False] * 4))
    np.testing.assert_array_equal(find(few, jnp.array([0, 1, 2, 3]), 2)[1], [[True, False]] * 2 + [[False] * 2] * 2)
