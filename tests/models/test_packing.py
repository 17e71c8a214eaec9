"""Lanes packed into channels give what each client gives alone."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.devices import use_platform
from fedjax_ssl.models import Heads, packing
from fedjax_ssl.models.cnn import SmallCNN
from fedjax_ssl.models.packing import block_diagonal
from fedjax_ssl.models.passes import centred, forward, use_lane_form
from fedjax_ssl.models.resnet import Block, ResNet
from fedjax_ssl.models.resnet9 import ResNet9
from fedjax_ssl.models.wide_resnet import WideResNet

pytestmark = pytest.mark.test_all

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
    """Heads on a backbone, and for each lane random variables, images of two views and a mask, with short batches."""
    make, options = BACKBONES[kind]
    heads, rng = Heads(make(normalisation=normalisation, **options), 3, {}), np.random.default_rng(0)
    images = rng.normal(size=(LANES, VIEWS * BATCH, 8, 8, 3)).astype(np.float32)

    def drawn(leaf):
        shape = (LANES, *leaf.shape)
        if leaf.ndim == 1:  # scales, biases, means and variances
            return rng.uniform(0.5, 1.5, shape).astype(np.float32)
        return rng.normal(0, np.prod(leaf.shape[:-1]) ** -0.5, shape).astype(np.float32)

    variables = jax.tree.map(drawn, jax.eval_shape(heads.init, jax.random.key(0), images[0]))
    mask = np.tile(np.arange(BATCH) < np.array([8, 5, 7, 0, 8])[:, None], (1, VIEWS))
    return heads, variables, images, mask


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


def both(function, *arguments):
    """What the function gives in packed lanes, and in lanes that are not."""
    results = []
    for form in ("packed", "grouped"):
        with use_lane_form(form):
            results.append(jax.device_get(jax.jit(lambda *given: function(*given))(*arguments)))
    return results


def assert_close(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, e, atol=1e-4 * max(1.0, float(np.abs(e).max())))


@pytest.mark.parametrize(
    ("kind", "normalisation"),
    [("cnn", "static"), ("resnet", "running"), ("wide_resnet", "group"), ("resnet9", "none")],
)
def test_packed_lanes_equal_lanes(kind, normalisation):
    heads, *arguments = network(kind, normalisation)
    results = both(jax.vmap(lambda *one: trained(heads, *one)), *arguments)
    assert_close(*(jax.tree.map(lambda leaf: np.delete(leaf, EMPTY, axis=0), result) for result in results))


def test_a_lane_that_diverges_changes_no_other():
    heads, variables, images, mask = network("cnn", "static")
    broken = jax.tree.map(np.copy, variables)
    for leaf in jax.tree.leaves(broken):
        leaf[0], leaf[1] = np.nan, np.inf
    with use_lane_form("packed"):
        run = jax.jit(jax.vmap(lambda *one: trained(heads, *one)))
        results = [jax.device_get(run(given, images, mask)) for given in (broken, variables)]
    others = np.array([lane for lane in range(LANES) if lane not in (0, 1, EMPTY)])
    assert_close(*(jax.tree.map(lambda leaf: leaf[others], result) for result in results))


def test_without_a_mask_and_with_fewer_lanes_than_fit():
    heads, variables, images, _ = network("cnn", "running")
    two = jax.tree.map(lambda leaf: leaf[:2], (variables, images))
    assert_close(*both(jax.vmap(lambda variables, images: trained(heads, variables, images, None)), *two))


def test_evaluation_of_the_same_images_and_a_single_lane_equal_lanes():
    heads, variables, images, mask = network("cnn", "running")
    assert_close(*both(jax.vmap(heads.apply, (0, None)), variables, images[0]))
    lane = jax.tree.map(lambda leaf: leaf[0], (variables, images, mask))
    assert_close(*both(lambda *one: trained(heads, *one), *lane))


class Blocks(nn.Module):
    """Three equal blocks."""

    @nn.compact
    def __call__(self, x):
        blocks = [Block(3, normalisation="running", name=f"block{number}") for number in range(3)]
        return packing.joined(packing.in_turn(blocks, x, False, None, 1))


def test_equal_blocks_are_a_scan_of_one_in_evaluation_on_a_tpu():
    images = jax.random.normal(jax.random.key(3), (4, 5, 5, 3))
    variables = jax.jit(Blocks().init)(jax.random.key(1), images)
    results = []
    for platform, number in (("cpu", 3), ("tpu", 1)):
        with use_platform(platform):
            lowered = jax.jit(lambda variables: Blocks().apply(variables, images)).lower(variables)
        assert lowered.as_text().count("stablehlo.convolution") in (0, 2 * number)  # a CPU's may be matrix products
        results.append(lowered.compile()(variables))
    assert_close(*results)


def test_four_lanes_lie_side_by_side_on_a_tpu_alone_in_128_channels():
    heads, *arguments = network("wide_resnet", "static")
    four = jax.tree.map(lambda leaf: leaf[:4], arguments)
    texts = {}
    for platform in ("tpu", "gpu"):
        with use_platform(platform):
            texts[platform] = str(jax.make_jaxpr(jax.vmap(lambda *one: trained(heads, *one)))(*four))
    # Activations of a normalisation, with 64 positions: of four lanes together, or of each lane.
    together, apart = "f32[16,64,128]", "f32[4,16,64,32]"
    assert together in texts["tpu"] and together not in texts["gpu"] and apart in texts["gpu"]
    # One block a stage: the first of a stage is as wide as the stage before.
    assert set(re.findall(r"(?:feature|batch)_group_count=(\d+)", texts["tpu"])) == {"1", "2"}
    # The kernels of an input's gradient have both groups on this side.
    assert {int(inputs) for inputs in re.findall(r"\[3,3,(\d+),\d+\]", texts["tpu"])} == {12, 64, 128, 2 * 128}
    assert packing.lanes() == 1


@pytest.mark.parametrize(("channels", "features", "left"), [(3, 200, 1), (64, 128, 2), (128, 128, 4)])
def test_a_block_diagonal_kernel_convolves_each_group(channels, features, left):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 3, 3, 4 * channels)).astype(np.float32)
    kernel = rng.normal(0, (9 * channels) ** -0.5, (4, 3, 3, channels, features)).astype(np.float32)
    wide = jax.jit(block_diagonal)(kernel)
    assert wide.shape == (left, 3, 3, 4 // left * channels, 4 // left * features)
    blocks = [forward(part, own, centred((3, 3), 1)) for part, own in zip(np.split(x, left, -1), wide)]
    each = [forward(part, own, centred((3, 3), 1)) for part, own in zip(np.split(x, 4, -1), kernel)]
    np.testing.assert_allclose(np.concatenate(blocks, -1), np.concatenate(each, -1), atol=1e-4)
