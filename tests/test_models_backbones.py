"""Whole models: sizes, shapes, views, padding, dtypes."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from fedjax_ssl.errors import UserError
from fedjax_ssl.models import BACKBONES, POLICIES, Heads, Linear, build_model
from fedjax_ssl.models.network import Network
from fedjax_ssl.models.wide_resnet import WideResNet


def linear(width):
    """What a method's file says of a head: a function of the `model` section that gives the head's factory."""
    return lambda config: functools.partial(Linear, width)


def model(num_classes=10, heads=None, **overrides):
    config = {"name": "cnn", "width": 0, "normalisation": "static", "dtype": "float32"}
    return build_model(ConfigDict(config | overrides), num_classes, heads)


@functools.cache
def small(normalisation="running", dtype="float32"):
    """The small CNN for 8x8 digits, its variables and twenty images."""
    images = jax.random.normal(jax.random.key(0), (20, 8, 8, 1))
    built = model(heads={"projector": linear(16)}, normalisation=normalisation, dtype=dtype)
    return built, jax.jit(built.init)(jax.random.key(1), images), images


def loss_and_gradient(built, variables, images, mask=None, num_views=1):
    """Outputs, gradient of a masked sum over outputs, and new statistics of one training pass."""

    @jax.jit
    def run(params, images, mask):
        def loss(params):
            outputs, state = built.apply(
                variables | {"params": params},
                images,
                train=True,
                mask=mask,
                num_views=num_views,
                mutable=["batch_stats"],
            )
            valid = jnp.ones(len(images)) if mask is None else mask
            total = sum((jnp.sin(o) * valid[:, None]).sum() for o in jax.tree.leaves(outputs))
            return total, (outputs, state)

        gradient, aux = jax.grad(loss, has_aux=True)(params)
        return gradient, *aux

    return run(variables["params"], images, mask)


def assert_trees_close(actual, expected, atol=2e-5):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, e, atol=atol * max(1.0, float(jnp.abs(e).max())))


@pytest.mark.parametrize(
    ("name", "num_classes", "count"),
    [
        ("resnet8", 10, 78_042),
        ("wrn16_1", 10, 175_066),
        ("resnet18", 10, 11_173_962),
        ("resnet18", 100, 11_220_132),
        ("wrn28_2", 10, 1_467_610),
        ("wrn28_8", 100, 23_401_012),
    ],
)
def test_number_of_learnable_parameters(name, num_classes, count):
    built = model(num_classes, name=name)
    variables = jax.eval_shape(built.init, jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
    assert sum(leaf.size for leaf in jax.tree.leaves(variables["params"])) == count


@pytest.mark.parametrize(("k", "num_classes", "expected"), [(2, 10, 1_467_610), (8, 100, 23_401_012)])
def test_wide_resnet_count_by_hand(k, num_classes, expected):
    count, channels = 3 * 3 * 3 * 16, 16
    for width in (16 * k, 32 * k, 64 * k):
        for block_input in (channels, width, width, width):
            convolutions = 9 * block_input * width + 9 * width * width
            shortcut = block_input * width if block_input != width else 0
            count += convolutions + shortcut + 2 * block_input + 2 * width
        channels = width
    assert count + 2 * width + width * num_classes + num_classes == expected


def test_resnet8_count_by_hand_at_any_width():
    """Three stages of one block; a shortcut has weights where the channels change."""
    for width in (16, 24):
        w = [width, 2 * width, 4 * width]
        convolutions = (
            9 * 3 * w[0] + 2 * 9 * w[0] ** 2 + sum(9 * (a * b + b * b) + a * b for a, b in itertools.pairwise(w))
        )
        normalisations = 2 * (w[0] + 2 * w[0] + 3 * w[1] + 3 * w[2])
        variables = jax.eval_shape(
            model(name="resnet8", width=width).init, jax.random.key(0), jnp.zeros((1, 32, 32, 3))
        )
        count = sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))
        assert count == convolutions + normalisations + 4 * width * 10 + 10


@pytest.mark.parametrize(("name", "width"), [("cnn", 16), ("wrn28_2", 16), ("resnet8", -1), ("resnet8", 1.5)])
def test_a_width_that_a_backbone_cannot_have(name, width):
    with pytest.raises(UserError, match=r"model\.width"):
        model(name=name, width=width)


@pytest.mark.parametrize("name", sorted(BACKBONES))
@pytest.mark.parametrize("shape", [(32, 32, 3), (9, 13, 1)])
def test_shapes_and_tree_for_any_image(name, shape):
    images = jnp.zeros((4, *shape))
    for policy in POLICIES:
        built = model(7, {"projector": linear(16), "rotation": linear(4)}, name=name, normalisation=policy)
        variables = jax.eval_shape(built.init, jax.random.key(0), images)
        assert set(variables["params"]) == {"backbone", "classifier", "projector", "rotation"}
        assert ("batch_stats" in variables) == (policy != "group")
        apply = functools.partial(built.apply, train=True, num_views=2)
        outputs = jax.eval_shape(apply, {"params": variables["params"]}, images)
        assert outputs.logits.shape == (4, 7)
        assert jax.tree.map(jnp.shape, outputs.heads) == {
            "projector": (4, 16),
            "rotation": (4, 4),
        }
        assert outputs.features.shape == (4, variables["params"]["projector"]["kernel"].shape[0])
    single = model(7, name=name)
    outputs, variables = jax.eval_shape(single.init_with_output, jax.random.key(0), images)
    assert outputs.heads == {} and set(variables["params"]) == {"backbone", "classifier"}


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
    network = Network(module, (0.5,), (0.25,), (2, 2, 1), "group", embedding="projector")
    trained = network.init(jax.random.key(0))
    assert set(trained.params) == {"classifier", "projector", "cosines"} and trained.batch_stats == {}
    images = np.random.default_rng(0).integers(0, 256, (6, 2, 2, 1)).astype(np.uint8)
    outputs = network.predict(trained, images)
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
    np.testing.assert_allclose(network.probabilities(trained, images), p, atol=1e-5)
    in_parts = network.predict_rows(trained, jnp.array(images), jnp.array([4, 0, 3]), batch_size=2)
    np.testing.assert_allclose(in_parts.logits, logits[[4, 0, 3]], atol=1e-5)


def test_two_views_equal_two_passes():
    built, variables, images = small()
    gradient, outputs, state = loss_and_gradient(built, variables, images, num_views=2)
    first_gradient, first, between = loss_and_gradient(built, variables, images[:10])
    second_gradient, second, expected = loss_and_gradient(built, variables | between, images[10:])
    assert_trees_close(outputs, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, second))
    assert_trees_close(gradient, jax.tree.map(jnp.add, first_gradient, second_gradient), atol=1e-4)
    assert_trees_close(state, expected)


@pytest.mark.parametrize("normalisation", POLICIES)
def test_padding_rows_change_nothing(normalisation):
    """Thirteen examples in batches of ten: the last one, of three, is padded."""
    built, variables, images = small(normalisation)
    mask = (jnp.arange(10) < 3).astype(jnp.float32)
    padded = images[:10].at[3:].set(1e3)
    gradient, outputs, state = loss_and_gradient(built, variables, padded, mask)
    expected_gradient, expected, expected_state = loss_and_gradient(built, variables, images[:3])
    assert_trees_close(jax.tree.map(lambda o: o[:3], outputs), expected)
    assert_trees_close(gradient, expected_gradient, atol=1e-4)
    assert_trees_close(state, expected_state)


def test_evaluation_does_not_depend_on_the_rest_of_the_batch():
    built, variables, images = small()
    apply = jax.jit(built.apply)
    together = apply(variables, images)
    assert_trees_close(jax.tree.map(lambda o: o[4:7], together), apply(variables, images[4:7]), atol=1e-6)


def test_bfloat16_computes_near_float32():
    built, variables, images = small()
    half = small(dtype="bfloat16")[0]
    gradient, outputs, state = loss_and_gradient(half, variables, images)
    _, expected, expected_state = loss_and_gradient(built, variables, images)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((gradient, outputs, state)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert_trees_close(outputs, expected, atol=0.05)
    assert_trees_close(state, expected_state, atol=0.02)


def test_residual_network_trains_on_an_odd_image():
    """A shallow relative of WRN-28-2, with every kind of block, against plain convolutions."""
    images = jax.random.normal(jax.random.key(0), (6, 9, 11, 3))
    built = Heads(WideResNet(depth=10, width=1), 3, {"projector": functools.partial(Linear, 4)})
    variables = jax.jit(built.init)(jax.random.key(1), images)
    gradient, outputs, _ = loss_and_gradient(built, variables, images, num_views=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "another")  # the plain convolution
        expected_gradient, expected, _ = loss_and_gradient(built, variables, images, num_views=2)
    assert_trees_close(outputs, expected)
    assert_trees_close(gradient, expected_gradient, atol=1e-3)


@pytest.mark.parametrize(("field", "known"), [("name", "resnet18"), ("normalisation", "static"), ("dtype", "bfloat16")])
def test_unknown_names_list_the_known_ones(field, known):
    with pytest.raises(UserError, match=known):
        model(**{field: "unheard_of"})
