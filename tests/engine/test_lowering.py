"""Rounds lowered for GPUs and TPUs, which are not here, in the forms that those take. Nothing of it is run."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from fedjax_ssl.engine.round import make_round
from fedjax_ssl.learning.devices import AXIS, use_platform
from fedjax_ssl.models import BACKBONES, packing
from fedjax_ssl.run.experiment import build_experiment
from tests.helpers.runs import make_tiny_config

LANES, SIDE = 3, 16
POLICIES = {"lenet": "none", "vit": "group"}  # which normalise nothing, and tokens
IMAGES_ALONE = [name for name in BACKBONES if name not in ("mlp", "linear", "transformer")]
# Each backbone once, for one of them in turn; one backbone for all.
KINDS = list(itertools.product(("cuda", "tpu"), ("float32", "bfloat16")))
LOWERED = [(name, *KINDS[number % 4]) for number, name in enumerate(IMAGES_ALONE)]
LOWERED += [("resnet8", *kind) for kind in KINDS if ("resnet8", *kind) not in LOWERED]


@pytest.fixture(scope="module")
def npz(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("data") / "images.npz", np.random.default_rng(0)
    arrays = {f"x_{part}": rng.integers(0, 256, (400, SIDE, SIDE, 3), np.uint8) for part in ("train", "test")}
    np.savez(path, y_train=np.arange(400) % 10, y_test=np.arange(400) % 10, **arrays)
    return path


def lower(npz, name, platform, dtype, devices=1):
    """(the exported round, the experiment): clients train on labels, `LANES` side by side on each device; no server."""
    fields = {
        "data.source": "npz",
        "data.path": str(npz),
        "data.examples_per_client": 10,
        "model.name": name,
        "model.dtype": dtype,
        "model.normalisation": POLICIES.get(name, "static"),
        "server.epochs": 0,
        "num_clients": 24,
        "clients_per_round": LANES * devices,
    }
    with use_platform("gpu" if platform == "cuda" else platform):
        experiment = build_experiment(make_tiny_config(**fields))
        round_fn = make_round(experiment.problem, experiment.method, LANES)
        arguments = experiment.state_shape, experiment.data, experiment.hidden_labels
        if devices == 1:
            return export.export(jax.jit(round_fn), platforms=[platform])(*arguments), experiment
        mesh = AbstractMesh((devices,), (AXIS,))
        everywhere = NamedSharding(mesh, PartitionSpec())
        with jax.sharding.use_abstract_mesh(mesh):
            jitted = jax.jit(round_fn, in_shardings=everywhere, out_shardings=everywhere)
            return export.export(jitted, platforms=[platform])(*jax.tree.map(jax.typeof, arguments)), experiment


def convolutions(text):
    """(type of the numbers, groups) of each convolution of a program."""
    found = re.findall(r"stablehlo\.convolution.*?feature_group_count = (\d+).*-> tensor<[\dx]*x(\w+)>", text)
    return [(dtype, int(groups)) for groups, dtype in found]


@pytest.mark.parametrize(("name", "platform", "dtype"), LOWERED)
def test_a_round_of_every_backbone(npz, name, platform, dtype):
    exported, experiment = lower(npz, name, platform, dtype)
    assert exported.platforms == (platform,)
    with use_platform("gpu"):
        predict = experiment.problem.network.predict
        images = jnp.zeros((4, SIDE, SIDE, 3), jnp.uint8)
        forward = str(jax.make_jaxpr(predict)(experiment.state_shape.model, images)).count("conv_general_dilated")
    found = convolutions(exported.mlir_module())
    # In lanes: forward; to the input but of the first layer; to the kernel, of a GPU by matrix products. A packed
    # backbone has its forward pass twice, which the compiler joins. Evaluation and statistics: plain.
    narrow = getattr(experiment.problem.network.module.backbone, "narrow_channels", packing.CHANNELS)
    packed = platform == "tpu" and narrow < packing.CHANNELS
    in_lanes = {"cuda": 2, "tpu": 4 if packed else 3}[platform] * forward - 1
    expected = in_lanes + (1 + (name not in POLICIES)) * forward
    if packed:
        # A block of 128 channels is dense; several blocks of them are the groups of one convolution. Where a layer's
        # lanes fill more than a block, they are in as many more groups, at most one for each lane.
        blocks, lanes = -(-LANES * narrow // packing.CHANNELS), min(LANES, packing.CHANNELS // narrow)
        groups = {groups for _, groups in found}
        assert len(found) >= expected and {1, blocks} <= groups
        assert groups <= {1, *(blocks * parts for parts in range(1, lanes + 1) if lanes % parts == 0)}
    else:
        assert len(found) == expected
    if platform == "cuda":
        assert sum(groups == LANES for _, groups in found) == in_lanes
    assert {numbers for numbers, _ in found} == {"bf16" if dtype == "bfloat16" else "f32"}
    trained = jax.tree.leaves(experiment.state_shape.model)
    assert {leaf.dtype for leaf in trained} == {np.dtype("float32")}  # parameters stay so


@pytest.mark.parametrize(("platform", "dtype"), [("cuda", "bfloat16"), ("tpu", "float32")])
def test_a_round_on_eight_devices(npz, platform, dtype):
    exported, _ = lower(npz, "resnet8", platform, dtype, devices=8)
    text = exported.mlir_module()
    assert exported.nr_devices == 8 and exported.platforms == (platform,)
    # Lanes, statistics and evaluation are split; the mean of the uploads is left to the partitioner.
    assert text.count("sdy.manual_computation") == 3
    # The lanes of a GPU are groups; those of a TPU are packed, here into one block of 128 channels.
    groups = {"cuda": {1, LANES}, "tpu": {1}}[platform]
    assert set(convolutions(text)) == {("bf16" if dtype == "bfloat16" else "f32", number) for number in groups}
