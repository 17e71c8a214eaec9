"""Steps and rounds lowered for GPUs and TPUs, which are not here, in the forms that those take. Nothing of it is run.

Every backbone's step is lowered by itself, for a round traces its backbone seven times; whole rounds of one backbone.
"""

import itertools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from fedjax_ssl.base.devices import AXIS, use_platform
from fedjax_ssl.engine.round import make_round
from fedjax_ssl.models import BACKBONES, packing
from fedjax_ssl.ops.losses import cross_entropy
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.run.experiment import build_experiment, make_problem
from tests.helpers.runs import make_tiny_config

pytestmark = pytest.mark.test_all  # run by `make test-all`: what they check is no program of this machine
LANES, SIDE = 3, 16
POLICIES = {"lenet": "none", "vit": "group"}  # which normalise nothing, and tokens
# The others are for tables and texts, or those of these lines with other numbers of blocks and channels.
OTHERS = ("mlp", "linear", "transformer", "resnet18", "resnet34", "wrn28_2", "wrn28_8")
IMAGES_ALONE = [name for name in BACKBONES if name not in OTHERS]
# Each backbone once, for one of them in turn; one backbone for all.
OF_ROUNDS = "resnet8"
KINDS = list(itertools.product(("cuda", "tpu"), ("float32", "bfloat16")))
LOWERED = [(name, *KINDS[number % 4]) for number, name in enumerate(IMAGES_ALONE)]
LOWERED += [(OF_ROUNDS, *kind) for kind in KINDS if (OF_ROUNDS, *kind) not in LOWERED]
LOWERED += [(f"{__file__}:OfFlax", "cuda", "float32"), (f"{__file__}:OfFlax", "tpu", "float32")]


class OfFlax(nn.Module):
    """A user's backbone: Flax's own layers."""

    @nn.compact
    def __call__(self, images):
        x = nn.max_pool(nn.relu(nn.Conv(8, (3, 3))(images)), (2, 2), (2, 2))
        return nn.relu(nn.Conv(16, (3, 3), 2)(x)).mean((1, 2))


@pytest.fixture(scope="module")
def npz(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("data") / "images.npz", np.random.default_rng(0)
    arrays = {f"x_{part}": rng.integers(0, 256, (400, SIDE, SIDE, 3), np.uint8) for part in ("train", "test")}
    np.savez(path, y_train=np.arange(400) % 10, y_test=np.arange(400) % 10, **arrays)
    return path


def make_config(name, dtype, **fields):
    """Clients train on labels, `LANES` side by side on each device; the server trains nothing."""
    return make_tiny_config(**{
        "model.name": name, "model.dtype": dtype, "model.normalisation": POLICIES.get(name, "static"),
        "server.epochs": 0, "server.pretrain_epochs": 0, "num_clients": 24, "clients_per_round": LANES, **fields,
    })  # fmt: skip


def lower_step(name, platform, dtype):
    """(the exported gradients of `LANES` models and outputs of one in evaluation, the network, a model's shapes)."""
    of_images = {"image_shape": [SIDE, SIDE, 3], "mean": [0.5], "std": [0.25], "flip": True}
    facts = {"name": "npz", "num_classes": 10, **of_images}
    network = make_problem(make_config(name, dtype), facts, lacks_labels=False).network

    def loss(params, statistics, images, labels):
        mask = jnp.ones(len(images), bool)
        (outputs,), after = network.train(Model(params, statistics), (images,), mask)
        return cross_entropy(outputs.logits, labels, mask), after

    def step(model, models, images, labels):
        of_lanes = jax.vmap(jax.grad(loss, has_aux=True))(*models, images, labels)
        return of_lanes, network.predict(model, images[0]).logits

    with use_platform("gpu" if platform == "cuda" else platform):
        model = jax.eval_shape(network.init, jax.random.key(0))
        models = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((LANES, *leaf.shape), leaf.dtype), model)
        images = jax.ShapeDtypeStruct((LANES, 10, SIDE, SIDE, 3), np.uint8)
        labels = jax.ShapeDtypeStruct((LANES, 10), np.int32)
        return export.export(jax.jit(step), platforms=[platform])(model, models, images, labels), network, model


def lower_round(npz, platform, dtype, devices):
    """The exported round of `OF_ROUNDS`."""
    fields = {"data.source": "npz", "data.path": str(npz), "data.examples_per_client": 10}
    with use_platform("gpu" if platform == "cuda" else platform):
        experiment = build_experiment(make_config(OF_ROUNDS, dtype, **fields, clients_per_round=LANES * devices))
        round_fn = make_round(experiment.problem, experiment.method, LANES)
        arguments = experiment.state_shape, experiment.data, experiment.hidden_labels
        mesh = AbstractMesh((devices,), (AXIS,), axis_types=(AxisType.Auto,))
        everywhere = NamedSharding(mesh, PartitionSpec())
        with jax.sharding.use_abstract_mesh(mesh):
            jitted = jax.jit(round_fn, in_shardings=everywhere, out_shardings=everywhere)
            return export.export(jitted, platforms=[platform])(*jax.tree.map(jax.typeof, arguments))


def convolutions(text):
    """(type of the numbers, groups) of each convolution of a program."""
    found = re.findall(r"stablehlo\.convolution.*?feature_group_count = (\d+).*-> tensor<[\dx]*x(\w+)>", text)
    return [(dtype, int(groups)) for groups, dtype in found]


def check_convolutions(exported, network, model, platform, dtype):
    """All in `dtype`, and of parameters in float32; lanes are groups on a GPU and packed on a TPU."""
    found = convolutions(exported.mlir_module())
    groups = {groups for _, groups in found}
    narrow = getattr(network.module.backbone, "narrow_channels", packing.CHANNELS)
    if platform == "cuda":
        assert LANES in groups
    elif narrow < packing.CHANNELS:
        # A block of 128 channels is dense; several blocks of them are the groups of one convolution. Where a layer's
        # lanes fill more than a block, they are in as many more groups, at most one for each lane.
        blocks, lanes = -(-LANES * narrow // packing.CHANNELS), min(LANES, packing.CHANNELS // narrow)
        assert {1, blocks} <= groups
        assert groups <= {1, *(blocks * parts for parts in range(1, lanes + 1) if lanes % parts == 0)}
    assert {numbers for numbers, _ in found} == {"bf16" if dtype == "bfloat16" else "f32"}
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {np.dtype("float32")}  # parameters stay so


@pytest.mark.parametrize(("name", "platform", "dtype"), LOWERED)
def test_a_step_of_every_backbone(name, platform, dtype):
    exported, network, model = lower_step(name, platform, dtype)
    assert exported.platforms == (platform,)
    check_convolutions(exported, network, model, platform, dtype)


@pytest.mark.parametrize(("platform", "dtype"), [("cuda", "bfloat16"), ("tpu", "float32")])
def test_a_round_on_eight_devices(npz, platform, dtype):
    exported = lower_round(npz, platform, dtype, devices=8)
    text = exported.mlir_module()
    assert exported.nr_devices == 8 and exported.platforms == (platform,)
    # Lanes, statistics and evaluation are split; the mean of the uploads is left to the partitioner.
    assert text.count("sdy.manual_computation") == 3
    # The lanes of a GPU are groups; those of a TPU are packed, here into one block of 128 channels.
    groups = {"cuda": {1, LANES}, "tpu": {1}}[platform]
    assert set(convolutions(text)) == {("bf16" if dtype == "bfloat16" else "f32", number) for number in groups}
