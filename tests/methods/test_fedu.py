"""FedU, FedEMA and parts of BYOL where tests/official does not go."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.client import byol
from fedjax_ssl.client.deck import Deck, of_whole_batches
from fedjax_ssl.config import apply_arguments, base_config, differences, flatten
from fedjax_ssl.methods import METHODS
from fedjax_ssl.models import Heads, Linear
from fedjax_ssl.models.resnet import ResNet
from tests.helpers.linear_heads import DIM, LinearHeads, assert_kernels, kernels
from tests.helpers.small_problem import federation, phases_of, prepare, sent_down, small_problem

ONLINE = ("backbone", "projector", "predictor")


@pytest.fixture(scope="module")
def data():
    return federation([[0, 2], [-1] * 7], at_server=[0, 1, 2, 1])


def test_a_deck_of_whole_batches():
    sizes = np.array([0, 2, 3, 5, 6, 10], np.int32)
    whole = jax.jit(lambda size: of_whole_batches(Deck(jnp.zeros(10), jnp.zeros((1, 10)), size), 3).size)
    np.testing.assert_array_equal(whole(sizes), [0, 2, 3, 3, 6, 9])


def test_mu_is_at_most_one(data):
    """A client whose scale times divergence is 1.8 begins with its own model."""
    network = LinearHeads({"projector": ("", DIM), "predictor": ("projector", DIM)})
    problem = small_problem("fedema", network, **{"fedema.scale": 9.0})
    method = METHODS["fedema"].factory(problem)
    received, last = sent_down(problem, np.int32(7)), sent_down(problem, seed=8).model.params
    shapes = jax.eval_shape(method.init, data, jax.random.key(0)).clients
    own = jax.tree.map(lambda leaf: np.zeros(leaf.shape[1:], leaf.dtype), shapes)
    own |= {"online": {name: last[name] for name in ONLINE}, "last_round": np.int32(3)}
    own |= {"scale": np.float32(9.0), "divergence": np.float32(0.2)}
    (phase,) = phases_of(method)
    carry = jax.jit(phase.start)(received, data, prepare(phase, received, data, 0, own).work, own)
    assert_kernels(carry.learner.model.params, kernels(last, *ONLINE))


@pytest.mark.parametrize("name", ["fedu", "fedema"])
def test_named_in_orchestra_s_config_they_have_views_of_their_own_and_its_widths(name):
    ours, theirs = (apply_arguments(base_config(), arguments) for arguments in (name, f"orchestra,{name}"))
    widths = {"model.projector_hidden": (512, 128), "model.projector_dim": (512, 64)}
    assert differences(flatten(theirs), flatten(ours)) == widths


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


def test_heads_may_be_named_in_any_order():
    """A head that reads another takes its outputs. tests/official has what heads compute, in FedU and Orchestra."""
    heads = {"after": lambda name: Linear(4, reads="before", name=name), "before": lambda name: Linear(3, name=name)}
    x = np.random.default_rng(0).normal(size=(8, 7)).astype(np.float32)

    class Same(Linear):
        def __call__(self, images, train=False, mask=None, num_views=1):
            return super().__call__(images)

    one, other = (Heads(Same(6), 3, {name: heads[name] for name in order}) for order in (heads, reversed(heads)))
    variables = jax.jit(one.init)(jax.random.key(0), x)
    found, expected = (module.apply(variables, x) for module in (one, other))
    assert found.heads["after"].shape == (8, 4)
    jax.tree.map(np.testing.assert_array_equal, found.heads, expected.heads)
