"""Runs on a frozen encoder's features, and with adapters: a tiny Vision Transformer on the digits."""

import hashlib
import types

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from fedjax_ssl import load, train
from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data import load_dataset
from fedjax_ssl.models.encoders import WithAdapters, encode, load_weights, save_weights
from fedjax_ssl.models.encoders import encoder as table
from fedjax_ssl.models.encoders.convert import convert
from fedjax_ssl.models.vit import ViT
from fedjax_ssl.ops.augment import image_views
from fedjax_ssl.records.runs import read_run
from fedjax_ssl.report.model_card import model_card
from fedjax_ssl.run import features
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.run.warm_start import find_warm_start
from fedjax_ssl.serve.export import export_run
from fedjax_ssl.serve.predictor import predict_file
from tests.helpers.runs import make_fedanchor_config

pytestmark = pytest.mark.test_all

NAME, SIDE = "vit_s16", 16
TINY = ViT(patch=8, depth=2, width=16, head_width=8, class_token=True)


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """A file of random weights of the tiny encoder, and a separate cache."""
    encoder = table.ENCODERS[NAME]._replace(module=TINY, side=SIDE)
    monkeypatch.setitem(table.ENCODERS, NAME, encoder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    random = np.random.default_rng(0)
    shapes = jax.tree_util.tree_leaves_with_path(encoder.shapes(SIDE))
    arrays = {
        "/".join(key.key for key in path): random.normal(size=leaf.shape).astype(np.float32) for path, leaf in shapes
    }
    save_weights(tmp_path / "tiny.safetensors", encoder, arrays)
    return tmp_path / "tiny.safetensors"


def make_config(weights, **overrides):
    fields = {"method": "fixmatch", "model.name": "linear", "num_rounds": 2, "server.pretrain_epochs": 0}
    fields |= {"encoder.name": NAME, "encoder.weights": str(weights), "encoder.strong_views": 1}
    fields |= {"encoder.weak_views": 2, "model.normalisation": "none", "augment.flavour": "none"}
    return make_fedanchor_config(**{**fields, **overrides})


@pytest.mark.parametrize(
    ("name", "layer", "shape"),
    [("resnet50", "conv1.weight", ()), ("efficientnet_lite0", "blocks.0.0.bn3.weight", (3,))],
)
def test_weights_of_another_shape_and_layers_that_there_are_not_are_one_line(tmp_path, name, layer, shape):
    save_file({layer: np.zeros(shape, np.float32)}, tmp_path / "theirs.safetensors")
    with pytest.raises(UserError) as caught:
        convert(tmp_path / "theirs.safetensors", name, tmp_path / "ours.safetensors")
    assert f"{layer} of shape {shape} is not {name}'s" in str(caught.value)


def test_conversion_never_replaces_what_it_reads_and_writes_no_nan(weights, tmp_path):
    ours = load_file(weights)
    with pytest.raises(UserError, match="and not be the file that is read"):
        convert(weights, NAME, weights)
    encoder = table.ENCODERS[NAME]
    with pytest.raises(UserError, match="params/norm/bias has numbers that are not finite"):
        save_weights(tmp_path / "new.safetensors", encoder, ours | {"params/norm/bias": np.full(16, np.float32("nan"))})
    save_weights(tmp_path / "a/b/new.safetensors", encoder, ours)  # makes the folders
    with pytest.raises(UserError, match=r"cannot write .*new\.safetensors: "):
        (tmp_path / "file").touch()
        save_weights(tmp_path / "file/new.safetensors", encoder, ours)


def test_features_are_the_encoder_s_and_come_out_of_the_cache(weights, monkeypatch, capfd):
    config = make_config(weights)
    images = load_dataset(config.data)
    images = images._replace(x_train=images.x_train[:300], x_test=images.x_test[:50])
    first = features.through_encoder(config, images)
    assert first.x_train.shape == (300, 3, 16)
    assert first.x_test.shape == (50, 1, 16)
    assert "950 views, 0 MB of features in memory" in capfd.readouterr().err
    encoder = table.ENCODERS[NAME]
    plain = encode(encoder, load_weights(weights, encoder, SIDE), images.x_train[:5] / np.float32(255), SIDE)
    np.testing.assert_allclose(first.x_train[:5, 0], plain, atol=1e-5)
    assert all(np.abs(first.x_train[:, view] - first.x_train[:, 0]).max() > 0.1 for view in (1, 2))
    rows = first.x_train.reshape(-1, 16).astype(np.float64)
    np.testing.assert_allclose(first.mean, rows.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(first.std, [np.sqrt(rows.var(axis=0).mean())] * 16, rtol=1e-6)

    encoded, put = [], features.KeptFiles.put

    def noted(self, key, value):
        encoded.append(0 if "-" in key else len(value) // 64)  # keys of JAX have a -
        put(self, key, value)

    monkeypatch.setattr(features.KeptFiles, "put", noted)
    np.testing.assert_array_equal(features.through_encoder(config, images).x_train, first.x_train)
    assert not sum(encoded)
    # Missing blocks, as after a stop, damaged blocks, and another's blocks are encoded again.
    blocks = sorted((weights.parent / "cache/fedjax_ssl/features").iterdir(), key=lambda path: path.stat().st_size)
    assert len(blocks) == 3  # 300 and 50 images, 256 in a file
    blocks[0].unlink()
    blocks[1].write_bytes(blocks[1].read_bytes()[:-4] + b"\0\0\x80\x3f")
    again = features.through_encoder(config, images)
    np.testing.assert_array_equal(again.x_train, first.x_train)
    np.testing.assert_array_equal(again.x_test, first.x_test)
    assert sum(encoded) == 50 + 3 * 44
    assert "is not what was written" in capfd.readouterr().err
    kept = blocks[1].read_bytes()
    features.through_encoder(config, images._replace(x_train=255 - images.x_train))
    others = (path.read_bytes() for path in blocks[0].parent.iterdir() if path not in blocks)
    blocks[1].write_bytes(next(other for other in others if len(other) == len(kept)))
    np.testing.assert_array_equal(features.through_encoder(config, images).x_train, first.x_train)
    assert "is not what was written" in capfd.readouterr().err


def test_features_of_other_views_are_not_taken_from_the_cache():
    """Every field that views of images read is in the names of its files."""
    config, read = make_fedanchor_config(), set()

    class Noting:
        def __getitem__(self, name):
            read.add(name)
            return config.augment[name]

        __getattr__ = __getitem__

    image_views(types.SimpleNamespace(augment=Noting(), views=config.views), (8, 8, 1), True)
    assert read == set(features._AUGMENTATION)


def test_a_run_on_features(weights, tmp_path):
    config = make_config(weights)
    state = train(config, tmp_path / "run")
    assert state.model.params["classifier"]["kernel"].shape == (16, 10)
    assert not jax.tree.leaves(state.model.params.get("backbone", {}))
    predictor = load(tmp_path / "run")
    assert predictor(np.zeros((3, 16), np.float32)).labels.shape == (3,)

    # A classifier without a backbone can start another run.
    start = find_warm_start(build_experiment(make_config(weights, init_from=str(tmp_path / "run"))))
    assert start.facts["parts"] == ["classifier"]

    # Images are accepted only with the encoder weights of the training.
    data = load_dataset(config.data)
    of_features = predictor(features.through_encoder(config, data).x_test)
    np.testing.assert_array_equal(predictor(data.x_test).probabilities, of_features.probabilities)
    grey = predictor(data.x_test[:3, :, :, 0])  # as an npz may have them
    np.testing.assert_array_equal(grey.probabilities, predictor(data.x_test[:3]).probabilities)
    np.savez(tmp_path / "images.npz", images=data.x_test)
    predict_file(tmp_path / "run", tmp_path / "found.csv", npz=str(tmp_path / "images.npz"))
    assert (tmp_path / "found.csv").read_text().startswith("image,class,probability\n0,")
    with pytest.raises(UserError, match=r"images are uint8 \(2, 5, 5, 1\); the model takes .* 8x8x1"):
        predictor(np.zeros((2, 5, 5, 1), np.uint8))
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\x80\x3f")
    again = predictor(data.x_test[:3])  # the weights are read only once
    np.testing.assert_array_equal(again.probabilities, grey.probabilities)
    with pytest.raises(UserError, match="are not the weights that the model was trained with"):
        load(tmp_path / "run")(data.x_test)


def test_adapters_begin_at_the_frozen_encoder(weights):
    """B = 0 at first, so features equal the encoder's for any A; later they are those of W + A B."""
    config = make_config(weights, **{"encoder.adapters.rank": 2, "encoder.adapters.blocks": 2})
    network, encoder = build_experiment(config).problem.network, table.ENCODERS[NAME]
    images = load_dataset(config.data).x_test[:3]
    model, predict = jax.jit(network.init)(jax.random.key(1)), jax.jit(network.predict)
    of_pixels = jax.jit(lambda variables, pixels: encode(encoder, variables, pixels, SIDE))
    frozen = of_pixels(load_weights(weights, encoder, SIDE), images / np.float32(255))
    np.testing.assert_allclose(predict(model, images).features, frozen, atol=1e-5)
    backbone = {name: leaf if name.endswith("A") else leaf + 1 for name, leaf in model.params["backbone"].items()}
    moved = model._replace(params={**model.params, "backbone": backbone})
    variables = load_weights(weights, encoder, SIDE)
    for block in ("block0", "block1"):
        variables["params"][block]["qkv"]["kernel"] += np.matmul(backbone[f"{block}_A"], backbone[f"{block}_B"])
    expected = of_pixels(variables, images / np.float32(255))
    np.testing.assert_allclose(predict(moved, images).features, expected, atol=1e-4)
    assert np.abs(expected - frozen).max() > 0.1


def test_adapters_alone_are_trained_and_sent(weights, tmp_path):
    adapters = {"encoder.adapters.rank": 2, "encoder.adapters.blocks": 1}
    config = make_config(weights, **adapters, num_rounds=1)
    experiment = build_experiment(config)
    assert isinstance(experiment.problem.network.module.backbone, WithAdapters)
    backbone = experiment.state_shape.model.params["backbone"]
    assert {name: leaf.shape for name, leaf in backbone.items()} == {"block1_A": (16, 2), "block1_B": (2, 48)}
    state = train(config, tmp_path / "run")
    assert np.abs(state.model.params["backbone"]["block1_B"]).max() > 0
    images = load_dataset(config.data).x_test[:2]
    found = load(tmp_path / "run")(images)
    assert found.embeddings.shape == (2, 16)

    export_run(tmp_path / "run", tmp_path / "model.safetensors", "safetensors")
    with safe_open(tmp_path / "model.safetensors", "numpy") as file:
        told = file.metadata()
    assert (told["backbone"], told["encoder"], told["encoder_side"]) == (f"{NAME}, adapters of rank 2", NAME, "16")
    assert told["weights"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    card = model_card(read_run(tmp_path / "run"))
    assert card.startswith(f"# {NAME}, adapters of rank 2 trained with") and told["weights"] in card

    # Checkpoints lack the frozen weights: with other weights a run can be neither loaded nor resumed.
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\x80\x3f")
    with pytest.raises(UserError, match="are not the weights that the model was trained with"):
        load(tmp_path / "run")
    config.num_rounds = 2
    with pytest.raises(UserError, match=r"is not what the checkpoint .* was trained with \(weights: "):
        train(config, tmp_path / "run")


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"encoder.weights": ""}, "encoder.name=vit_s16 takes encoder.weights"),
        ({"encoder.weights": "nowhere.safetensors"}, "there is no such file"),
        ({"data.normalisation": "none"}, "has its own means and deviations; leave data.normalisation='own'"),
        ({"encoder.name": "resnet50"}, "batch_stats/.* is missing"),
        ({"encoder.name": "resnet50", "encoder.adapters.rank": 1}, "resnet50 has 0 blocks of a Vision Transformer"),
        ({"encoder.side": 20}, "encoder.side=20 is not a multiple of 8"),
        ({"encoder.adapters.rank": 1, "encoder.adapters.blocks": 3}, "blocks is 3, but vit_s16 has 2"),
    ],
)
def test_what_does_not_fit_is_said(weights, fields, words):
    with pytest.raises(UserError, match=words):
        build_experiment(make_config(weights, **fields))


def test_a_file_of_other_weights_is_refused(weights, tmp_path):
    encoder, arrays = table.ENCODERS[NAME], load_file(weights)
    changes = {
        "params/norm/bias is missing": lambda a: a.pop("params/norm/bias"),
        "params/other is left over": lambda a: a.update({"params/other": np.zeros(1, np.float32)}),
        r"params/norm/bias is float32 \(2,\), not float32 \(16,\)": lambda a: a.update(
            {"params/norm/bias": np.zeros(2, np.float32)}
        ),
    }
    for words, change in changes.items():
        other = dict(arrays)
        change(other)
        save_file(other, tmp_path / "other.safetensors")
        with pytest.raises(UserError, match=words):
            load_weights(tmp_path / "other.safetensors", encoder, SIDE)
    (tmp_path / "other.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UserError, match="is not a safetensors file"):
        load_weights(tmp_path / "other.safetensors", encoder, SIDE)
