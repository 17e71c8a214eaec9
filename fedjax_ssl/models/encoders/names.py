"""Translates PyTorch's names of weights (timm, torchvision, the repositories of DINOv2 and CLIP) to this library's."""

import re
from typing import Any

import numpy as np

from fedjax_ssl.models.efficientnet import LITE0
from fedjax_ssl.models.normalisation import EPSILON

Translated = tuple[str, Any] | None
_TENSORFLOW_EPSILON = 1e-3  # added to variances by EfficientNet's normalisation
# Classifiers, counters, and the parts of models that features do not need: DINOv2's mask, CLIP's text tower.
_NOT_NEEDED = re.compile(
    r"(fc|_fc|classifier|head|transformer|token_embedding|ln_final)\.|.*num_batches_tracked$|mask_token$"
    r"|positional_embedding$|text_projection$|logit_scale$|visual\.proj$|(input_resolution|context_length|vocab_size)$"
)


def of_vit(name: str, array: Any) -> Translated:
    """Translates Vision Transformers of timm and DINOv2, and CLIP's image tower (names begin with 'visual.')."""
    if _NOT_NEEDED.match(name):
        return None
    name = name.removeprefix("visual.")
    if name in ("cls_token", "class_embedding"):
        return "params/class_token", array.reshape(-1)
    if name in ("pos_embed", "positional_embedding"):
        return "params/positions", array.reshape(array.shape[-2:])
    name = re.sub(r"^(transformer\.resblocks|blocks)\.(\d+)\.", r"block\2.", name)
    for theirs, ours in (
        (r"(patch_embed\.proj|^conv1)\.", "patches."),
        (r"(norm_pre|ln_pre)\.", "pre_norm."),
        (r"ln_post\.", "norm."),
        (r"\.ln_([12])\.", r".norm\1."),
        (r"attn\.in_proj_(weight|bias)$", r"qkv.\1"),
        (r"attn\.out_proj\.", "proj."),
        (r"(attn|mlp)\.(qkv|proj|fc1|fc2)\.", r"\2."),
        (r"mlp\.c_fc\.", "fc1."),
        (r"mlp\.c_proj\.", "fc2."),
        (r"\.ls([12])\.gamma$", r".scale\1"),
    ):
        name = re.sub(theirs, ours, name)
    return _of_layer(name, array)


def of_resnet(name: str, array: Any) -> Translated:
    """Translates ResNets of timm and torchvision."""
    if _NOT_NEEDED.match(name):
        return None
    name = re.sub(r"^conv1\.", "stem_conv.", name)
    name = re.sub(r"^bn1\.", "stem_norm.", name)
    name = re.sub(r"^layer(\d)\.(\d+)\.", lambda m: f"stage{int(m[1]) - 1}_block{m[2]}.", name)
    name = re.sub(r"\.conv(\d)\.", lambda m: f".conv{int(m[1]) - 1}.", name)
    name = re.sub(r"\.bn(\d)\.", lambda m: f".norm{int(m[1]) - 1}.", name)
    return _of_layer(name.replace("downsample.0.", "shortcut_conv.").replace("downsample.1.", "shortcut_norm."), array)


_STARTS = [sum(stage[0] for stage in LITE0[:number]) for number in range(len(LITE0))]  # first block of each stage
# A block's layers in order. timm numbers normalisations from 1 on, even in blocks without expansion.
_LAYERS = ("expand", "depthwise", "project")
_EFFICIENTNET_PYTORCH = {
    "_expand_conv": "expand", "_bn0": "expand_norm", "_depthwise_conv": "depthwise", "_bn1": "depthwise_norm",
    "_project_conv": "project", "_bn2": "project_norm",
}  # fmt: skip


def of_efficientnet(name: str, array: Any) -> Translated:
    """Translates timm's tf_efficientnet_lite0 and packages like efficientnet_pytorch, with TensorFlow's epsilon."""
    if _NOT_NEEDED.match(name):
        return None
    of_timm = re.match(r"blocks\.(\d)\.(\d)\.(conv_pw|conv_dw|conv_pwl|bn\d)\.(.*)", name)
    of_package = re.match(r"_blocks\.(\d+)\.(_\w+)\.(.*)", name)
    if of_timm:
        stage, block, layer, rest = int(of_timm[1]), int(of_timm[2]), of_timm[3], of_timm[4]
        layers = _LAYERS if stage else _LAYERS[1:]
        if layer.startswith("bn"):
            ours = f"{layers[int(layer[2:]) - 1]}_norm"
        else:
            ours = {"conv_dw": "depthwise", "conv_pw": layers[0] if stage else "project", "conv_pwl": "project"}[layer]
        name = f"block{_STARTS[stage] + block}_{ours}.{rest}"
    elif of_package:
        ours = _EFFICIENTNET_PYTORCH.get(of_package[2], of_package[2])
        name = f"block{of_package[1]}_{ours}.{of_package[3]}"
    else:
        name = re.sub(r"^_?conv_(stem|head)\.", r"\1.", name)
        name = re.sub(r"^(_bn0|bn1)\.", "stem_norm.", name)
        name = re.sub(r"^(_bn1|bn2)\.", "head_norm.", name)
    if name.endswith("running_var"):
        array = array + (_TENSORFLOW_EPSILON - EPSILON)
    return _of_layer(name, array)


def _of_layer(name: str, array: Any) -> tuple[str, Any]:
    """Translates 'LAYER.weight' etc.; kernels are transposed to Flax's [height, width, in, out] or [in, out]."""
    layer, _, leaf = name.rpartition(".")
    collection = "params"
    if leaf == "weight" and array.ndim == 1:
        leaf = "scale"
    elif leaf == "weight":
        leaf, array = "kernel", np.moveaxis(array, (0, 1), (-1, -2))
    elif leaf in ("running_mean", "running_var"):
        collection, leaf = "batch_stats", leaf.removeprefix("running_")
    return "/".join([collection, *filter(None, layer.split(".")), leaf]), array
