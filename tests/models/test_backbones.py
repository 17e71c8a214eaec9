"""Whole models: sizes, shapes, views, padding, dtypes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.models import POLICIES, Linear, build_model
from fedjax_ssl.models.cnn import SmallCNN
from fedjax_ssl.models.resnet import ResNet
from fedjax_ssl.models.resnet9 import ResNet9
from fedjax_ssl.models.vectors import Mlp
from fedjax_ssl.models.wide_resnet import WideResNet


def linear(width):
    """What a method's file says of a head: a function of the `model` section that gives the head's factory."""
    return lambda config: functools.partial(Linear, width)


def model(num_classes=10, heads=None, **overrides):
    config = {"name": "cnn", "width": 0, "normalisation": "static", "dtype": "float32", "classifier_init": "lecun"}
    return build_model(ConfigDict(config | overrides), num_classes, heads)


@functools.cache
def small(dtype="float32"):
    """A small network for 8x8 digits, its variables and twenty images."""
    images = np.random.default_rng(0).normal(size=(20, 8, 8, 1)).astype(np.float32)
    built = model(heads={"projector": linear(16)}, normalisation="running", dtype=dtype)
    return built, jax.jit(built.init)(jax.random.key(1), images), images


def loss_and_gradient(built, variables, images):
    """The gradient of a sum over outputs, the outputs, and the new statistics of one training pass."""

    def loss(params):
        outputs, state = built.apply(variables | {"params": params}, images, train=True, mutable=["batch_stats"])
        return sum(jnp.sin(o).sum() for o in jax.tree.leaves(outputs)), (outputs, state)

    gradient, (outputs, state) = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
    return gradient, outputs, state


def assert_trees_close(actual, expected, atol):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, e, atol=atol * max(1.0, float(jnp.abs(e).max())))


@pytest.mark.parametrize(
    ("name", "num_classes", "channels", "count"),
    [
        ("lenet", 10, 3, 92_626),  # with RSCFed's projector
        ("resnet8", 10, 3, 78_042),
        ("wrn16_1", 10, 3, 175_066),
        ("resnet18", 100, 3, 11_220_132),
        ("resnet18_imagenet", 1000, 3, 11_689_512),  # PyTorch's
        ("resnet9", 10, 3, 6_568_640),  # FedMatch's: kernels alone
        ("resnet34", 10, 3, 21_282_122),
        ("resnet50", 10, 1, 23_519_690),
        ("wrn28_2", 10, 3, 1_467_610),
        ("wrn28_8", 100, 3, 23_401_012),
    ],
)
def test_number_of_learnable_parameters(name, num_classes, channels, count):
    policy = "none" if name in ("lenet", "resnet9") else "static"
    assert count_of(model(num_classes, name=name, normalisation=policy), (32, 32, channels)) == count


def count_of(built, shape=(32, 32, 3)):
    variables = jax.eval_shape(built.init, jax.random.key(0), jnp.zeros((1, *shape)))
    return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))


def convolved(x, kernel, stride=1):
    """A convolution by loops over the kernel: NumPy, zeros outside."""
    height, width = kernel.shape[:2]
    padded = np.pad(x, ((0, 0), (height // 2, height // 2), (width // 2, width // 2), (0, 0)))
    return sum(
        padded[:, a : a + x.shape[1] : stride, b : b + x.shape[2] : stride] @ kernel[a, b]
        for a in range(height)
        for b in range(width)
    )


def in_numpy(forward, module, shape):
    """Features of a module in evaluation, and what NumPy makes of them with the same, random, variables."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, *shape)).astype(np.float32)
    variables = jax.eval_shape(module.init, jax.random.key(0), x)
    variables = jax.tree.map(lambda leaf: rng.uniform(0.2, 1.0, leaf.shape).astype(np.float32) - 0.4, variables)
    variables["batch_stats"] = jax.tree.map(lambda leaf: np.abs(leaf) + 0.1, variables["batch_stats"])

    def layer(scope, conv, norm, x, stride=1):
        """Convolution (or linear map) and normalisation of the block at `scope`, () for the module itself; "": none."""
        params, stats, y = variables["params"], variables["batch_stats"], x.astype(np.float64)
        for name in scope:
            params, stats = params[name], stats[name]
        if conv:
            kernel = params[conv]["kernel"]
            y = convolved(y, kernel, stride) if kernel.ndim == 4 else y.reshape(len(y), -1) @ kernel
        if not norm:
            return y
        y = (y - stats[norm]["mean"]) / np.sqrt(stats[norm]["var"] + 1e-5)
        return y * params[norm]["scale"] + params[norm]["bias"]

    return jax.jit(module.apply)(variables, x), forward(layer, x)


def relu(x):
    return np.maximum(x, 0)


def pooled(x):
    height, width = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
    corners = [x[:, a:height:2, b:width:2] for a in range(2) for b in range(2)]
    return np.max(corners, axis=0)


def imagenet_stem(layer, x):
    """A 7x7 convolution of stride 2, then the largest of 3x3 positions, two apart; a block, and one that widens."""
    x = relu(layer((), "stem_conv", "stem_norm", x, 2))
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    x = windows[:, ::2, ::2].max(axis=(-2, -1))
    y = relu(layer(["stage0_block0"], "conv0", "norm0", x))
    x = relu(x + layer(["stage0_block0"], "conv1", "norm1", y))
    y = relu(layer(["stage1_block0"], "conv0", "norm0", x, 2))
    y = layer(["stage1_block0"], "conv1", "norm1", y)
    x = relu(y + layer(["stage1_block0"], "shortcut_conv", "shortcut_norm", x, 2))
    return x.mean(axis=(1, 2))


def wide_resnet(layer, x):
    """Blocks of another width have a 1x1 convolution of the activated input in the shortcut."""
    x = layer((), "stem_conv", "", x)
    for stage, block in itertools.product(range(3), range(2)):
        scope, stride = [f"stage{stage}_block{block}"], 2 if stage and not block else 1
        active = relu(layer(scope, "", "norm0", x))
        y = relu(layer(scope, "", "norm1", layer(scope, "conv0", "", active, stride)))
        widens = stage > 0 and block == 0
        x = layer(scope, "conv1", "", y) + (layer(scope, "shortcut_conv", "", active, stride) if widens else x)
    return relu(layer((), "", "final_norm", x)).mean(axis=(1, 2))


def small_cnn(layer, x):
    for number in range(2):
        x = pooled(relu(layer((), f"conv{number}", f"norm{number}", x)))
    return relu(layer((), "hidden", "norm2", x))


def mlp(layer, x):
    return relu(layer((), "hidden1", "norm1", relu(layer((), "hidden0", "norm0", x))))


def resnet9(layer, x):
    def step(x, number):
        return relu(layer((), f"conv{number}", f"norm{number}", x))

    x = pooled(step(step(x, 0), 1))
    x = x + step(step(x, 2), 3)
    x = pooled(step(pooled(step(x, 4)), 5))
    x = x + step(step(x, 6), 7)
    return x.max(axis=(1, 2))


RUNNING = {"normalisation": "running"}


@pytest.mark.parametrize(
    ("forward", "module", "shape", "features"),
    [
        (imagenet_stem, ResNet(blocks=(1, 1), width=3, imagenet_stem=True, **RUNNING), (16, 16, 3), 6),
        (imagenet_stem, ResNet(blocks=(1, 1), width=3, imagenet_stem=True, **RUNNING), (15, 18, 1), 6),
        (wide_resnet, WideResNet(depth=16, width=1, **RUNNING), (7, 6, 1), 64),
        (small_cnn, SmallCNN(**RUNNING), (8, 9, 2), 128),
        (mlp, Mlp(**RUNNING), (8, 9, 2), 128),
        (resnet9, ResNet9(width=2, **RUNNING), (19, 16, 1), 16),
    ],
)
def test_features_against_numpy(forward, module, shape, features):
    actual, expected = in_numpy(forward, module, shape)
    assert actual.shape == (3, features)
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-4 if forward in (small_cnn, mlp) else 0)


def test_convolutions_begin_as_kaiming_normal():
    """Normal with variance 2 / fan-out, not truncated; a linear layer LeCun's."""
    params = small()[1]["params"]["backbone"]
    kernel = np.asarray(params["conv1"]["kernel"])
    assert kernel.shape == (3, 3, 16, 32)
    assert kernel.std() == pytest.approx(np.sqrt(2 / (9 * 32)), rel=0.05)
    assert np.abs(kernel).max() > 2.5 * kernel.std()
    assert np.std(params["hidden"]["kernel"]) == pytest.approx(128**-0.5, rel=0.05)


def test_resnet9_starts_as_fedmatchs():
    """Kernels of variance 1 / fan-in, truncated at two deviations of the normal that is cut."""
    built = model(name="resnet9", width=16, normalisation="none")
    params = jax.jit(built.init)(jax.random.key(0), jnp.zeros((1, 8, 8, 3)))["params"]
    for number in (2, 5, 6):
        kernel = np.asarray(params["backbone"][f"conv{number}"]["kernel"])
        deviation = kernel.shape[2] * 9
        assert abs(kernel.std() * np.sqrt(deviation) - 1) < 0.05
        assert np.abs(kernel).max() * np.sqrt(deviation) <= 2 / 0.87962566 + 1e-3
    assert list(params["classifier"]) == ["kernel"]


def test_a_width_is_the_backbone_s_own_or_refused():
    assert count_of(model(name="resnet8", width=64)) == 1_227_594  # SAGE's 1.23 M
    with pytest.raises(UserError, match=r"wrn28_2 has a width of its own, so leave model\.width 0"):
        model(name="wrn28_2", width=16)


def test_lenet_against_numpy_and_what_it_refuses():
    rng = np.random.default_rng(0)
    images = rng.normal(size=(2, 16, 18, 3)).astype(np.float32)
    built = model(name="lenet", normalisation="none")

    def drawn(leaf):
        return rng.normal(0, np.prod(leaf.shape[:-1]) ** -0.5, leaf.shape).astype(np.float32)

    params = jax.tree.map(drawn, jax.eval_shape(built.init, jax.random.key(0), images)["params"])
    features = jax.jit(built.apply)({"params": params}, images).features

    own, x = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["backbone"]), images.astype(np.float64)
    for i in range(2):
        windows = np.lib.stride_tricks.sliding_window_view(x, (5, 5), axis=(1, 2))  # [n, h, w, in, 5, 5]
        x = np.einsum("nhwcij,ijco->nhwo", windows, own[f"conv{i}"]["kernel"]) + own[f"bias{i}"]
        x = np.maximum(x, 0)[:, : x.shape[1] // 2 * 2, : x.shape[2] // 2 * 2]
        x = x.reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).max(axis=(2, 4))
    x = x.reshape(len(x), -1)
    for name in ("hidden0", "hidden1", "project0"):
        x = np.maximum(x @ own[name]["kernel"] + own[name]["bias"], 0)
    np.testing.assert_allclose(features, x @ own["project1"]["kernel"] + own["project1"]["bias"], atol=1e-4)
    for options, shape, line in (
        ({"normalisation": "running"}, (1, 16, 16, 3), "takes model.normalisation='none' alone"),
        ({"normalisation": "none"}, (1, 8, 16, 3), "images of 16x16 or more, not 8x16"),
    ):
        with pytest.raises(UserError, match=line):
            jax.eval_shape(model(name="lenet", **options).init, jax.random.key(0), jnp.zeros(shape))


@pytest.mark.parametrize(("name", "least"), [("cnn", 4), ("resnet9", 8)])
def test_the_smallest_images(name, least):
    start = functools.partial(jax.eval_shape, model(name=name).init, jax.random.key(0))
    start(jnp.zeros((1, least, least, 1)))
    with pytest.raises(UserError, match=f"images of {least}x{least} or more, not {least}x{least - 1}"):
        start(jnp.zeros((1, least, least - 1, 1)))


# One of each class. The others have a policy of their own, no parameter or other inputs: see tests/data/test_kinds.py.
@pytest.mark.parametrize("name", ["cnn", "mlp", "resnet8", "resnet9", "wrn16_1"])
def test_shapes_and_tree_for_any_image(name):
    heads, key = {"projector": linear(16), "rotation": linear(4)}, jax.random.key(0)
    for shape, policies in (((32, 32, 3), POLICIES), ((9, 13, 1), ["static"])):
        for policy in policies:
            built = model(7, heads, name=name, normalisation=policy)
            begin = functools.partial(built.init_with_output, train=True, num_views=2)
            outputs, variables = jax.eval_shape(begin, key, jnp.zeros((4, *shape)))
            assert set(variables["params"]) == {"backbone", "classifier", "projector", "rotation"}
            assert ("batch_stats" in variables) == (policy in ("static", "running"))
            assert outputs.logits.shape == (4, 7)
            assert jax.tree.map(jnp.shape, outputs.heads) == {"projector": (4, 16), "rotation": (4, 4)}
            assert outputs.features.shape == (4, variables["params"]["projector"]["kernel"].shape[0])


def test_bfloat16_computes_near_float32():
    built, variables, images = small()
    half = small(dtype="bfloat16")[0]
    gradient, outputs, state = loss_and_gradient(half, variables, images)
    _, expected, expected_state = loss_and_gradient(built, variables, images)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((gradient, outputs, state)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert_trees_close(outputs, expected, atol=0.05)
    assert_trees_close(state, expected_state, atol=0.02)


@pytest.mark.parametrize(("init", "limit"), [("lecun", np.inf), ("torch", 0.1)])
def test_the_classifier_begins_as_named(init, limit):
    """100 features: PyTorch draws from -1/10 to 1/10, which has a third of LeCun's variance of 1/100."""
    heads = model(num_classes=500, classifier_init=init).clone(backbone=lambda images, *_: images)
    classifier = jax.jit(heads.init)(jax.random.key(0), np.zeros((1, 100)))["params"]["classifier"]
    kernel = np.asarray(classifier["kernel"])
    assert kernel.shape == (100, 500) and np.all(classifier["bias"] == 0)
    np.testing.assert_allclose(kernel.var(), 0.01 if init == "lecun" else 0.01 / 3, rtol=0.02)  # 3 deviations
    assert (np.abs(kernel).max() > 0.2) == np.isinf(limit)
    if init == "torch":
        assert 0.099 < np.abs(kernel).max() <= limit
