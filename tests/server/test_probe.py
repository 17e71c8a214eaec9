"""The probe: ridge regression against scikit-learn, and when a round fits it, and fine-tunes what is tested."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import Ridge

from fedjax_ssl.engine.interface import Method, State
from fedjax_ssl.methods import METHODS
from fedjax_ssl.ops.losses import cross_entropy
from fedjax_ssl.server.probe import FEDERATED, ridge, with_probe
from tests.helpers.linear_heads import DIM, LinearHeads, assert_kernels, descend, kernels
from tests.helpers.linear_network import softmax
from tests.helpers.small_problem import CLASSES, federation, itself, pixels_of, small_problem, statistics_of

fit = jax.jit(ridge, static_argnums=(3, 4))


@pytest.mark.parametrize("size", [12, 60])
@pytest.mark.parametrize(("strength", "has_bias"), [(0.1, True), (3.0, False)])
def test_ridge_is_scikit_learns(size, strength, has_bias):
    """With more features than images and with fewer; features of all scales, and one that is constant."""
    rng = np.random.default_rng(size)
    features = (rng.normal(size=(size, 20)) * 10.0 ** rng.uniform(-2, 2, 20) + rng.normal(size=20)).astype(np.float32)
    features[:, 3] = 0.7
    labels = np.concatenate([np.arange(4), rng.choice(4, size - 4, p=[0.4, 0.3, 0.2, 0.1])])
    empty = {"kernel": np.zeros((20, 4)), **({"bias": np.zeros(4)} if has_bias else {})}
    found = fit(empty, features, labels, 4, strength)
    assert set(found) == set(empty)

    z, targets = features.astype(np.float64), np.eye(4)[labels]
    scale = z.std(axis=0) if has_bias else np.sqrt(np.mean(z**2, axis=0))
    inputs = (z - z.mean(axis=0) * has_bias) / np.where(np.arange(20) == 3, 1, scale)
    if not has_bias:
        inputs[:, 3] = 1  # it has weight there
    expected = Ridge(alpha=strength * size, fit_intercept=has_bias).fit(inputs, targets).predict(inputs)
    ours = features @ np.asarray(found["kernel"]) + (np.asarray(found["bias"]) if has_bias else 0)
    np.testing.assert_allclose(ours, expected, atol=2e-4)
    assert np.all(np.asarray(found["kernel"])[3] == 0) == has_bias


def test_a_class_without_a_labelled_image_is_never_predicted():
    """Its score is 0, and the scores of all classes sum to 1."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(12, 20)).astype(np.float32)
    found = fit({"kernel": np.zeros((20, 4)), "bias": np.zeros(4)}, features, np.arange(12) % 3, 4, 0.1)
    scores = 10 * rng.normal(size=(500, 20)) @ np.asarray(found["kernel"]) + np.asarray(found["bias"])
    assert np.all(scores[:, 3] == 0)
    np.testing.assert_allclose(scores.sum(axis=1), 1, atol=1e-4)
    assert set(scores.argmax(axis=1)) == {0, 1, 2}


@pytest.fixture(scope="module")
def data():
    return federation([[-1] * 4, [-1] * 3], at_server=[0, 1, 2, 2, 0, 1, 1])


def method_of(data, **fields):
    """A method on a linear network, its first state, and its stage of statistics as a function."""
    network = LinearHeads({"projector": ("", DIM), "predictor": ("projector", DIM)})
    problem = small_problem(
        "fedu", network, weak=itself, **{"server.augmentation": "weak", "server.learning_rate": 0.1, **fields}
    )
    method = METHODS["fedu"].factory(problem)
    state = jax.jit(method.init)(data, jax.random.key(0))
    return problem, method, state, jax.jit(method.statistics)(state, data, jnp.zeros(2, jnp.int32), jax.random.key(1))


def test_the_classifier_is_fitted_to_the_server_s_images_alone(data):
    _, _, before, after = method_of(data)
    x = np.asarray(data.inputs[:7], np.float64).reshape(7, -1) / 255 - statistics_of(before.model)
    features = x @ np.asarray(before.model.params["backbone"]["kernel"])
    targets = np.eye(CLASSES)[[0, 1, 2, 2, 0, 1, 1]]
    inputs = (features - features.mean(axis=0)) / features.std(axis=0)
    expected = Ridge(alpha=0.1 * 7).fit(inputs, targets).predict(inputs)
    classifier = after.model.params["classifier"]
    np.testing.assert_allclose(features @ classifier["kernel"] + classifier["bias"], expected, atol=1e-4)
    fitted = after.model._replace(params={**before.model.params, "classifier": classifier})
    jax.tree.map(np.testing.assert_array_equal, after._replace(model=fitted), after)
    assert FEDERATED not in after.server


def test_the_last_round_is_fine_tuned_as_much_as_the_first(data):
    """One step by hand at the server's rate. A cosine over rounds, which ends near 0, is of the clients' training."""
    problem, method, before, first = method_of(data, **{"probe.epochs": 1, "schedule": "cosine", "num_rounds": 50})
    last = before._replace(round=jnp.int32(49))
    last = jax.jit(method.statistics)(last, data, jnp.zeros(2, jnp.int32), jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, last.model, first.model)

    x, labels = pixels_of(data, range(7)), [0, 1, 2, 2, 0, 1, 1]
    fitted = first.server[FEDERATED].params
    begun = {**kernels(fitted, "backbone", "classifier"), "bias": np.asarray(fitted["classifier"]["bias"], np.float64)}

    def loss(model):
        logits = (x - x.mean(axis=0)) @ model["backbone"] @ model["classifier"] + model["bias"]
        return -np.mean(np.log(softmax(logits)[np.arange(7), labels]))

    by_hand, _ = descend(begun, [loss], problem.config.server)
    np.testing.assert_allclose(first.model.params["classifier"]["bias"], by_hand.pop("bias"), atol=1e-5)
    assert_kernels(first.model.params, by_hand)


def test_what_is_tested_is_fine_tuned_and_what_travels_is_not(data):
    _, _, _, plain = method_of(data)
    problem, method, _, tuned = method_of(data, **{"probe.epochs": 20, "server.batch_size": 3})
    jax.tree.map(np.testing.assert_array_equal, tuned.server[FEDERATED], plain.model)
    labels, mask = np.array([0, 1, 2, 2, 0, 1, 1]), np.ones(7, bool)

    def loss(model):
        return float(cross_entropy(problem.network.predict(model, data.inputs[:7]).logits, labels, mask))

    assert loss(tuned.model) < 0.9 * loss(plain.model)
    for part in ("backbone", "classifier"):
        assert np.any(tuned.model.params[part]["kernel"] != plain.model.params[part]["kernel"])
    for part in ("projector", "predictor"):
        np.testing.assert_array_equal(tuned.model.params[part]["kernel"], plain.model.params[part]["kernel"])
    begun, metrics = method.server_before(tuned, data, jax.random.key(2))
    assert metrics == {}
    jax.tree.map(np.testing.assert_array_equal, method.broadcast(begun, data, jax.random.key(3)).model, plain.model)


def test_each_model_has_the_statistics_of_its_own_weights(data):
    """Here they are the sum of the backbone's kernel."""

    def statistics(state, data, clients, key):
        sums = jax.tree.map(lambda leaf: 0 * leaf + state.model.params["backbone"]["kernel"].sum(), before.batch_stats)
        return state._replace(model=state.model._replace(batch_stats=sums))

    problem, key = small_problem("fedu", LinearHeads({}), **{"probe.epochs": 1}), jax.random.key(0)
    before = problem.network.init(key)
    stage = with_probe(problem, Method(None, None, (), None, statistics)).statistics
    after = jax.jit(stage)(State(jnp.int32(0), before), data, jnp.zeros(2, jnp.int32), key)
    models = after.server[FEDERATED], after.model
    sums = [np.sum(model.params["backbone"]["kernel"]) for model in models]
    np.testing.assert_allclose([statistics_of(model)[0] for model in models], sums, rtol=1e-5)
    assert abs(sums[0] - sums[1]) > 1e-3
