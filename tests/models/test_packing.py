"""Lanes packed into channels give what each client gives alone."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.devices import use_platform
from fedjax_ssl.models import POLICIES, Heads, packing
from fedjax_ssl.models.cnn import SmallCNN
from fedjax_ssl.models.packing import block_diagonal
from fedjax_ssl.models.passes import forward, use_lane_form
from fedjax_ssl.models.resnet import ResNet
from fedjax_ssl.models.resnet9 import ResNet9
from fedjax_ssl.models.wide_resnet import WideResNet

# Of the first four lanes fit side by side, of ResNet-9 all: other groups of lanes are filled up.
BACKBONES = {
    "cnn": (SmallCNN, {}),
    "resnet": (ResNet, {"blocks": (1, 1), "width": 32}),
    "wide_resnet": (WideResNet, {"depth": 10, "width": 2}),
    "resnet9": (ResNet9, {"width": 16}),
}
LANES, BATCH, VIEWS = 5, 8, 2
EMPTY = 3  # the lane without a valid example


def network(kind, normalisation):
    """Heads on a backbone, and for each lane its variables, images of two views and a mask, with short batches.

    Of images for which rounding decides whether some ReLU passes its gradient on, the gradients would not be equal.
    """
    make, options = BACKBONES[kind]
    heads = Heads(make(normalisation=normalisation, **options), 3, {})
    draw = lambda number, shape: jax.random.normal(jax.random.key(number), shape)  # noqa: E731
    each = lambda leaf: leaf + 0.1 * jnp.abs(draw(leaf.size, leaf.shape)) if leaf.ndim == 2 else leaf  # noqa: E731

    @jax.jit
    def arguments():
        # Images whose activations are not at ReLU's corner, where rounding decides on the gradient.
        images = draw(5, (LANES, VIEWS * BATCH, 8, 8, 3))
        variables = jax.vmap(heads.init, (0, None))(jax.random.split(jax.random.key(1), LANES), images[0])
        variables = jax.tree.map(each, variables)  # scales, biases and statistics
        return variables, images, jnp.tile(jnp.arange(BATCH) < jnp.array([8, 5, 7, 0, 8])[:, None], (1, VIEWS))

    return heads, *jax.device_get(arguments())


def trained(heads, variables, images, mask):
    """(features, gradients, statistics) of a lane's training pass."""
    others = {kind: part for kind, part in variables.items() if kind != "params"}

    def loss(params):
        outputs, state = heads.apply(
            {"params": params, **others}, images, True, mask, VIEWS, mutable=["batch_stats"]
        )  # fmt: skip
        valid = jnp.ones(len(images)) if mask is None else mask
        logits, features = (jnp.where(valid[:, None], x, 0) for x in (outputs.logits, outputs.features))
        return jnp.sum(jnp.sin(logits)), (features, state)

    gradients, (features, state) = jax.grad(loss, has_aux=True)(variables["params"])
    return features, gradients, state


def both(function, *arguments, axes=0):
    """The function packed and not, over lanes."""
    results = []
    for form in ("packed", "grouped"):
        with use_lane_form(form):
            results.append(jax.device_get(jax.jit(jax.vmap(function, axes))(*arguments)))
    return results


def assert_close(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, e, atol=1e-4 * max(1.0, float(np.abs(e).max())))


# ResNet-9's last layer takes maxima, whose gradient jumps between values that are equal but for rounding: only once.
KINDS = [*(("cnn", policy) for policy in POLICIES), ("resnet", "running"), ("wide_resnet", "group")]


@pytest.mark.parametrize(("kind", "normalisation"), [*KINDS, ("resnet9", "static")])
def test_packed_lanes_equal_lanes(kind, normalisation):
    heads, *arguments = network(kind, normalisation)
    results = both(lambda *one: trained(heads, *one), *arguments)
    assert_close(*(jax.tree.map(lambda leaf: np.delete(leaf, EMPTY, axis=0), result) for result in results))


def test_a_lane_that_diverges_changes_no_other():
    heads, variables, images, mask = network("cnn", "static")
    broken = jax.tree.map(np.copy, variables)
    for leaf in jax.tree.leaves(broken):
        leaf[0], leaf[1] = np.nan, np.inf
    (packed, _), (_, expected) = (both(lambda *one: trained(heads, *one), v, images, mask) for v in (broken, variables))
    others = [lane for lane in range(LANES) if lane not in (0, 1, EMPTY)]
    assert_close(*(jax.tree.map(lambda leaf: leaf[np.array(others)], result) for result in (packed, expected)))


def test_without_a_mask_and_with_fewer_lanes_than_fit():
    heads, variables, images, _ = network("wide_resnet", "running")
    two = jax.tree.map(lambda leaf: leaf[:2], (variables, images))
    assert_close(*both(lambda variables, images: trained(heads, variables, images, None), *two))


def test_evaluation_equals_lanes_also_of_one_model():
    heads, variables, images, _ = network("resnet", "running")
    assert_close(*both(heads.apply, variables, images))
    one = jax.tree.map(lambda leaf: leaf[0], variables)
    assert_close(*both(heads.apply, one, images, axes=(None, 0)))
    assert_close(*both(heads.apply, variables, images[0], axes=(0, None)))


def test_one_lane_equals_the_model_without_lanes():
    heads, *arguments = network("wide_resnet", "static")
    results = []
    for form in ("packed", "grouped"):
        with use_lane_form(form):
            lane = jax.tree.map(lambda leaf: leaf[0], arguments)
            results.append(jax.jit(lambda *one: trained(heads, *one))(*lane))
    assert_close(*results)


def test_equal_blocks_are_a_scan_of_one_in_evaluation_on_a_tpu():
    """Two equal blocks in each of three stages."""
    heads = Heads(WideResNet(depth=22, width=1, normalisation="running"), 3, {})
    images = jax.random.normal(jax.random.key(3), (4, 8, 8, 3))
    variables = jax.jit(heads.init)(jax.random.key(1), images)
    results = []
    for platform in ("cpu", "tpu"):
        with use_platform(platform):
            lowered = jax.jit(lambda variables: heads.apply(variables, images)).lower(variables)
        results.append(lowered.compile()(variables))
    assert_close(*results)
    # The stem, each stage's first block (of two stages with a shortcut), and one for its two others.
    assert lowered.as_text().count("stablehlo.convolution") == 1 + 3 * 2 + 2 + 3 * 2


def test_activations_hold_lanes_side_by_side_on_a_tpu_alone():
    heads, *arguments = network("wide_resnet", "static")
    for platform, channels in (("tpu", 4 * 32), ("gpu", 32)):
        with use_platform(platform):
            text = str(jax.make_jaxpr(jax.vmap(lambda *one: trained(heads, *one)))(*arguments))
        assert (f"f32[2,16,8,8,{channels}]" in text) == (platform == "tpu")
    assert packing.lanes() == 1


def test_four_lanes_have_128_channels_in_each_group_of_a_convolution():
    heads, *arguments = network("wide_resnet", "static")
    four = jax.tree.map(lambda leaf: leaf[:4], arguments)
    with use_platform("tpu"):
        text = str(jax.make_jaxpr(jax.vmap(lambda *one: trained(heads, *one)))(*four))
    # One block a stage: the first of a stage is as wide as the stage before.
    assert set(re.findall(r"(?:feature|batch)_group_count=(\d+)", text)) == {"1", "2"}
    # The kernels of an input's gradient have both groups on this side.
    assert {int(inputs) for inputs in re.findall(r"\[3,3,(\d+),\d+\]", text)} == {12, 64, 128, 2 * 128}


@pytest.mark.parametrize(
    ("channels", "features", "left"), [(32, 32, 1), (32, 64, 1), (64, 128, 2), (3, 200, 1), (128, 128, 4)]
)
def test_a_block_diagonal_kernel_convolves_each_group(channels, features, left):
    x = jax.random.normal(jax.random.key(0), (1, 5, 5, 4 * channels))
    kernel = jax.random.normal(jax.random.key(1), (4, 3, 3, channels, features)) / (9 * channels) ** 0.5
    wide = block_diagonal(kernel)
    assert wide.shape == (left, 3, 3, 4 // left * channels, 4 // left * features)
    side_by_side = jnp.moveaxis(kernel, 0, 3).reshape(3, 3, channels, 4 * features)
    blocks = [forward(part, own, 1) for part, own in zip(jnp.split(x, left, -1), wide)]
    np.testing.assert_allclose(jnp.concatenate(blocks, -1), forward(x, side_by_side, 1), atol=1e-4)
