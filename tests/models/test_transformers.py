"""Transformers of texts and of images, against NumPy."""

import math

import jax
import numpy as np
import pytest

from fedjax_ssl.models.transformer import Transformer
from fedjax_ssl.models.vit import ViT, heads_of


def block_by_numpy(params, heads, x, seen):
    """A pre-norm block on tokens x [B, T, D], of which `seen`, bool [B, T], are attended to."""

    def linear(name, x):
        return x @ params[name]["kernel"] + params[name]["bias"]

    query, key, value = np.split(linear("qkv", layer_normalised(params["norm1"], x)), 3, axis=-1)
    attended = np.zeros_like(x)
    for own in np.split(np.arange(x.shape[-1]), heads):
        scores = np.einsum("btd,bsd->bts", query[..., own], key[..., own]) / np.sqrt(len(own))
        weights = np.exp(scores) * seen[:, None]
        attended[..., own] = np.einsum("bts,bsd->btd", weights / weights.sum(axis=2, keepdims=True), value[..., own])
    x = x + linear("proj", attended)
    hidden = linear("fc1", layer_normalised(params["norm2"], x))
    gelu = hidden * np.vectorize(lambda z: (1 + math.erf(z / math.sqrt(2))) / 2)(hidden)
    return x + linear("fc2", gelu)


def layer_normalised(params, x):
    x = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-6)
    return x * params["scale"] + params["bias"]


def random_params(module, *inputs):
    """Parameters of a module, none of which is a default, in float32 and in float64."""
    shapes, rng = jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"], np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.5, leaf.shape).astype(np.float32), shapes)
    return params, jax.tree.map(np.float64, params)


def test_transformer_against_numpy():
    """Padding, token 0, is neither attended to nor in the mean."""
    tokens = np.array([[3, 1, 4, 0, 0], [2, 0, 5, 1, 3]])
    module = Transformer(num_tokens=6, depth=2, width=64)
    given, params = random_params(module, tokens)
    x, seen = params["embed"]["embedding"][tokens] + params["positions"], tokens != 0
    for number in range(2):
        x = block_by_numpy(params[f"block{number}"], 2, x, seen)
    x = layer_normalised(params["norm"], x)
    expected = [row[present].mean(axis=0) for row, present in zip(x, seen)]
    apply = jax.jit(module.apply)
    np.testing.assert_allclose(apply({"params": given}, tokens), expected, rtol=1e-3, atol=1e-3)
    assert np.isfinite(apply({"params": given}, 0 * tokens)).all()  # texts without a token


@pytest.mark.parametrize("class_token", [False, True])
def test_vit_against_numpy(class_token):
    images = np.random.default_rng(1).normal(size=(2, 4, 6, 3)).astype(np.float32)
    module = ViT(patch=2, depth=1, width=64, class_token=class_token)
    given, params = random_params(module, images)
    patches = images.reshape(2, 2, 2, 3, 2, 3).swapaxes(2, 3).reshape(2, 6, 12)  # row by row
    x = patches @ params["patches"]["kernel"].reshape(12, 64) + params["patches"]["bias"]
    if class_token:
        x = np.concatenate([np.tile(params["class_token"], (2, 1, 1)), x], axis=1)
    x = block_by_numpy(params["block0"], 2, x + params["positions"], np.ones(x.shape[:2], bool))
    x = layer_normalised(params["norm"], x)
    expected = x[:, 0] if class_token else x.mean(axis=1)
    np.testing.assert_allclose(jax.jit(module.apply)({"params": given}, images), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("width", "heads"), [(96, 3), (100, 2), (112, 2), (33, 1), (16, 1), (160, 5)])
def test_attention_has_heads_that_divide_the_width(width, heads):
    assert heads_of(width, head_width=32) == heads
