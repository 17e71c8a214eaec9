"""Heads beside the classifier: what they compute, against NumPy, and how they begin."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data.kinds import Images
from fedjax_ssl.models import Heads, Linear, heads_drawn
from fedjax_ssl.models.network import Network
from fedjax_ssl.models.projectors import Projection


def test_heads_against_numpy():
    """Every head is linear in the same features; what a head's factory gives need not be."""

    class Cosines(nn.Module):
        @nn.compact
        def __call__(self, features, train, mask, num_views):
            kernel = self.param("kernel", nn.initializers.normal(), (features.shape[1], 3))
            return features @ kernel / jnp.linalg.norm(features, axis=1, keepdims=True)

    class Flat(nn.Module):
        @nn.compact
        def __call__(self, images, train=False, mask=None, num_views=1):
            return images.reshape(len(images), -1)

    module = Heads(Flat(), 5, {"projector": functools.partial(Linear, 2), "cosines": Cosines})
    network = Network(module, Images((2, 2, 1), (0.5,), (0.25,)), "group", embedding="projector")
    trained = jax.jit(network.init)(jax.random.key(0))
    assert set(trained.params) == {"backbone", "classifier", "projector", "cosines"}
    assert trained.params["backbone"] == {} and trained.batch_stats == {}
    images = np.random.default_rng(0).integers(0, 256, (6, 2, 2, 1)).astype(np.uint8)
    outputs = jax.jit(network.predict)(trained, images)
    x = (images.reshape(6, 4) / 255 - 0.5) / 0.25
    params = jax.tree.map(np.asarray, trained.params)
    np.testing.assert_allclose(outputs.features, x, atol=1e-5)
    logits = x @ params["classifier"]["kernel"] + params["classifier"]["bias"]
    np.testing.assert_allclose(outputs.logits, logits, atol=1e-5)
    projected = x @ params["projector"]["kernel"] + params["projector"]["bias"]
    np.testing.assert_allclose(outputs.heads["projector"], projected, atol=1e-5)
    cosines = x @ params["cosines"]["kernel"] / np.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(outputs.heads["cosines"], cosines, atol=1e-5)
    # What represents an image: the named head, or the features.
    np.testing.assert_array_equal(network.embeddings(outputs), outputs.heads["projector"])
    np.testing.assert_array_equal(network._replace(embedding="").embeddings(outputs), outputs.features)
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(jax.jit(network.probabilities)(trained, images), p, atol=1e-5)
    in_parts = jax.jit(lambda *given: network.predict_rows(*given, batch_size=2))(trained, images, np.array([4, 0, 3]))
    np.testing.assert_allclose(in_parts.logits, logits[[4, 0, 3]], atol=1e-5)


def test_heads_begin_as_torch_draws_its_linear_layers():
    """`torch.nn.Linear`: kernel and bias uniform within 1 / sqrt(fan-in); here fan-in is 100."""
    heads = {"first": lambda name: Projection(True, name=name), "second": functools.partial(Linear, 400)}
    module = Heads(lambda images, *_: images, 500, heads, "torch_linear")
    fresh = jax.jit(module.init)(jax.random.key(0), np.zeros((1, 100)))["params"]
    fresh = fresh | {"backbone": {"kernel": np.ones((4, 4))}}
    params = jax.jit(heads_drawn, static_argnums=0)("torch_linear", fresh, jax.random.key(1))
    for name, leaf in itertools.product(("classifier", "first", "second"), ("kernel", "bias")):
        values = np.asarray(params[name][leaf])
        assert 0.09 < np.abs(values).max() <= 0.1
        np.testing.assert_allclose(values.var(), 0.01 / 3, rtol=3 / np.sqrt(values.size) + 0.02)
        assert len(np.unique(values)) > 0.9 * values.size
    np.testing.assert_array_equal(params["backbone"]["kernel"], 1)
    assert heads_drawn("torch", fresh, jax.random.key(1)) is fresh
