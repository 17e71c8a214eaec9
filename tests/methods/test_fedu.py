"""FedU and FedEMA: BYOL at the clients, and how their models follow the global one, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.client import byol
from fedjax_ssl.client.deck import Deck
from fedjax_ssl.config import apply_arguments, base_config, differences, flatten
from fedjax_ssl.methods import METHODS
from fedjax_ssl.models import Heads, Linear, Projector
from fedjax_ssl.models.resnet import ResNet
from fedjax_ssl.ops.sgd import Model
from tests.helpers.linear_heads import DIM, LinearHeads, assert_kernels, kernels
from tests.helpers.small_problem import (
    federation,
    phases_of,
    prepare,
    sent_down,
    small_problem,
)

ONLINE = ("backbone", "projector", "predictor")
ENCODER = ONLINE[:2]


@pytest.fixture(scope="module")
def data():
    return federation([[0, 2], [-1] * 7], at_server=[0, 1, 2, 1])


def problem_of(arguments, **fields):
    network = LinearHeads({"projector": ("", DIM), "predictor": ("projector", DIM)})
    return small_problem(arguments, network, **{"client.clip_norm": 0.0, "client.learning_rate": 0.1, **fields})


def memory_of(problem, received, data, **entries):
    """A client that never trained, or what is said of it; nobody reads the rest."""
    method = METHODS[problem.config.method].factory(problem)
    shapes = jax.eval_shape(method.init, data, jax.random.key(0)).clients
    fresh = jax.tree.map(lambda leaf: np.zeros(leaf.shape[1:], leaf.dtype), shapes)
    return {**fresh, "last_round": np.int32(-1), **entries}


def test_a_deck_of_whole_batches():
    sizes = np.array([0, 2, 3, 5, 6, 10], np.int32)
    whole = jax.jit(lambda size: Deck(jnp.zeros(10), jnp.zeros((1, 10)), size).of_whole_batches(3).size)
    np.testing.assert_array_equal(whole(sizes), [0, 2, 3, 3, 6, 9])


# --- FedU. -----------------------------------------------------------------------------------------------------------


def begun(phase, received, data, own):
    """The carry with which client 0 begins."""
    return jax.jit(phase.start)(received, data, prepare(phase, received, data, 0, own).work, own)


def test_both_encoders_may_begin_with_the_global_one(data):
    problem = problem_of("fedu,both")
    (phase,) = phases_of(METHODS["fedu"].factory(problem))
    received = sent_down(problem, np.int32(3))
    own = memory_of(problem, received, data, last_round=np.int32(2), divergence=np.float32(0))
    encoder = {name: received.model.params[name] for name in ENCODER}
    carry = begun(phase, received, data, own)
    jax.tree.map(np.testing.assert_array_equal, carry.memory["target"], encoder)
    kept = begun(phases_of(METHODS["fedu"].factory(problem_of("fedu")))[0], received, data, own)
    jax.tree.map(np.testing.assert_array_equal, kept.memory["target"], own["target"])


# --- FedEMA. ---------------------------------------------------------------------------------------------------------


def start_of(problem, data, received, **entries):
    """The online kernels with which a client begins."""
    (phase,) = phases_of(METHODS["fedema"].factory(problem))
    carry = begun(phase, received, data, memory_of(problem, received, data, **entries))
    return carry.learner.model


def mixture(own, received, mu):
    return {name: mu * own[name] + (1 - mu) * received[name] for name in ONLINE}


@pytest.mark.parametrize(("fields", "mu"), [({"fedema.scale": 9.0}, 1.0), ({}, 0.4)])
def test_mu_is_at_most_one(data, fields, mu):
    problem = problem_of("fedema", **fields)
    received, own = sent_down(problem, np.int32(7)), sent_down(problem, seed=8).model.params
    scale = np.float32(fields.get("fedema.scale", 2.0))
    entries = {"online": {name: own[name] for name in ONLINE}, "scale": scale, "divergence": np.float32(0.2)}
    model = start_of(problem, data, received, last_round=np.int32(3), **entries)
    assert_kernels(model.params, mixture(kernels(own, *ONLINE), kernels(received.model.params, *ONLINE), mu))


@pytest.mark.parametrize("name", ["fedu", "fedema"])
def test_named_in_orchestra_s_config_they_have_views_and_heads_of_their_own(name):
    ours, theirs = (apply_arguments(base_config(), arguments) for arguments in (name, f"orchestra,{name}"))
    assert differences(flatten(theirs), flatten(ours)) == {}


# --- Parts. ----------------------------------------------------------------------------------------------------------


def test_the_divergence_is_the_mean_over_convolutions_but_for_shortcuts():
    backbone, rng = ResNet(blocks=(1, 1), width=4), np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: backbone.init(jax.random.key(0), jnp.zeros((1, 8, 8, 3))))["params"]
    drawn = lambda leaf: rng.normal(size=leaf.shape).astype(np.float32)  # noqa: E731
    one, other = jax.tree.map(drawn, shapes), jax.tree.map(drawn, shapes)
    names = [("stem_conv",), *((f"stage{stage}_block0", f"conv{number}") for stage in (0, 1) for number in (0, 1))]
    lengths = []
    for path in names:
        leaf, second = one, other
        for name in (*path, "kernel"):
            leaf, second = leaf[name], second[name]
        lengths.append(np.linalg.norm((leaf - second).ravel()))
    divergence = jax.jit(byol.divergence)
    assert divergence(one, other) == pytest.approx(np.mean(lengths), rel=1e-5)
    dense = [{"hidden": {"kernel": np.full((2, 3), value), "bias": np.full(3, value)}} for value in (0.0, 2.0)]
    assert divergence(*dense) == pytest.approx((np.sqrt(24) + np.sqrt(12)) / 2)


def test_heads_on_heads():
    """A head that reads another takes its outputs, in whatever order they are named."""

    class Same(Linear):
        def __call__(self, images, train=False, mask=None, num_views=1):
            return super().__call__(images)

    heads = {"after": lambda name: Projector(4, 2, "running", reads="before", name=name),
             "before": lambda name: Projector(5, 3, "running", normalised=True, name=name),
             "turn": lambda name: Linear(4, reads="before", name=name)}  # fmt: skip
    module = Heads(Same(6), 3, heads)
    x = np.random.default_rng(0).normal(size=(8, 7)).astype(np.float32)
    variables = jax.jit(module.init)(jax.random.key(0), x)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables["params"])
    assert {name: set(params["before"][name]) for name in ("first", "norm", "second")} == {
        "first": {"kernel"}, "norm": {"scale", "bias"}, "second": {"kernel"}}  # fmt: skip
    assert "last_norm" not in params["before"] and set(params["after"]["second"]) == {"kernel", "bias"}
    outputs, _ = jax.jit(lambda v, x: module.apply(v, x, train=True, mutable=["batch_stats"]))(variables, x)

    def normalised(rows):
        return (rows - rows.mean(axis=0)) / np.sqrt(rows.var(axis=0) + 1e-5)

    def hidden(rows, name):
        return np.maximum(normalised(rows @ params[name]["first"]["kernel"]), 0) @ params[name]["second"]["kernel"]

    features = x @ params["backbone"]["kernel"]
    before = normalised(hidden(features, "before"))
    np.testing.assert_allclose(outputs.features, features, atol=1e-4)
    np.testing.assert_allclose(outputs.heads["before"], before, atol=1e-3)
    np.testing.assert_allclose(outputs.heads["after"], hidden(before, "after"), atol=1e-3)
    np.testing.assert_allclose(outputs.heads["turn"], before @ params["turn"]["kernel"], atol=1e-3)


def test_a_model_needs_no_predictor_to_be_averaged_with():
    """The classifier neither trains nor travels up: the upload has the online network alone."""
    problem = problem_of("fedu")
    data = federation([[0]], at_server=[0, 1])
    state = jax.eval_shape(METHODS["fedu"].factory(problem).init, data, jax.random.key(0))
    assert set(state.model.params) == {"backbone", "classifier", "projector", "predictor"}
    assert set(state.clients) == {"target", "last_round", "predictor", "divergence"}
    assert isinstance(state.model, Model) and set(state.clients["target"]) == set(ENCODER)
