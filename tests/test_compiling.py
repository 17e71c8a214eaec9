"""The tests compile as fast as possible, which must give the same numbers as users get."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.data.kinds import Images
from fedjax_ssl.models import Heads
from fedjax_ssl.models.cnn import SmallCNN
from fedjax_ssl.models.network import Network
from fedjax_ssl.ops.augment import weak_augment
from fedjax_ssl.ops.losses import cross_entropy

# XLA's defaults of the flags with which the tests compile, see `FAST_COMPILING` of tests/helpers/compiling.py.
DEFAULTS = {"xla_backend_optimization_level": "3", "xla_cpu_use_fusion_emitters": "True"}
AS_USERS = {name: value for name, value in DEFAULTS.items() if name in os.environ["XLA_FLAGS"]}


@pytest.mark.test_all
def test_training_compiled_as_users_do_has_the_same_numbers():
    """Compares convolutions and their gradients, normalisation, weak views and evaluation after two steps."""
    network = Network(Heads(SmallCNN("running"), 4, {}), Images((8, 8, 1), (0.5,), (0.25,)), "running")
    images = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 1)).astype(np.uint8)
    labels, mask = np.arange(12) % 4, np.arange(12) < 11
    model = jax.jit(network.init)(jax.random.key(0))

    def step(_, model):
        def loss(params):
            views = images, weak_augment(jax.random.key(1), images, True, 2)
            (first, second), batch_stats = network.train(model._replace(params=params), views, mask)
            return cross_entropy(first.logits, labels, mask) + cross_entropy(second.logits, labels, mask), batch_stats

        gradients, batch_stats = jax.grad(loss, has_aux=True)(model.params)
        return type(model)(jax.tree.map(lambda old, new: old - 0.05 * new, model.params, gradients), batch_stats)

    def train_and_test(model):
        trained = jax.lax.fori_loop(0, 2, step, model)
        return trained, network.probabilities(trained, jnp.asarray(images))

    lowered = jax.jit(train_and_test).lower(model)
    quick, optimised = lowered.compile(), lowered.compile(AS_USERS)
    assert len({len(program.runtime_executable().serialize()) for program in (quick, optimised)}) == 2
    (found, actual), (reference, expected) = quick(model), optimised(model)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    moved = jax.tree.map(lambda new, old: float(jnp.abs(new - old).max()), reference.params, model.params)
    assert max(jax.tree.leaves(moved)) > 1e-3
