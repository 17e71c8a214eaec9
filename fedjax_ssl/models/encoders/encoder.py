"""The encoders by name, with their inputs and outputs."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_ssl.base.errors import UserError, known_are
from fedjax_ssl.models.efficientnet import EfficientNet
from fedjax_ssl.models.encoders import names
from fedjax_ssl.models.resnet import ResNet
from fedjax_ssl.models.vit import ViT
from fedjax_ssl.ops.augment import resize

Variables = dict[str, Any]  # 'params' and 'batch_stats', as Flax has them

_HALF = (0.5, 0.5, 0.5)
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


class Encoder(NamedTuple):
    """An architecture with published weights."""

    module: nn.Module  # a backbone: (images [B, H, W, 3]) -> features [B, F]
    side: int  # of the square images of its training, in pixels
    # mean and std: for each channel, to normalise pixels from 0 to 1.
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    # PyTorch's name and array -> this library's name, 'params/LAYER/NAME', and array; None if features do not need it.
    translate: Callable[[str, Any], tuple[str, Any] | None]

    def shapes(self, side: int) -> Variables:
        """The shapes of the module's variables for images of side x side pixels."""
        one = jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)
        found: Variables = jax.eval_shape(self.module.init, jax.random.key(0), one)
        return found


_vit = functools.partial(ViT, depth=12, head_width=64, class_token=True)
_CLIP_B32 = _vit(patch=32, width=768, pre_norm=True, quick_gelu=True, epsilon=1e-5)
_RESNET50 = ResNet((3, 4, 6, 3), bottleneck=True, imagenet_stem=True, normalisation="running")

ENCODERS: dict[str, Encoder] = {
    "vit_s16": Encoder(_vit(patch=16, width=384), 224, _HALF, _HALF, names.of_vit),
    "dinov2_vit_s14": Encoder(_vit(patch=14, width=384, layer_scale=True), 224, *_IMAGENET, names.of_vit),
    "clip_vit_b32": Encoder(_CLIP_B32, 224, *_CLIP, names.of_vit),
    "efficientnet_lite0": Encoder(EfficientNet(), 224, _HALF, _HALF, names.of_efficientnet),
    "resnet50": Encoder(_RESNET50, 224, *_IMAGENET, names.of_resnet),
}


def find_encoder(name: str) -> Encoder:
    """Looks up an encoder by its name. Raises UserError if there is no such encoder."""
    if name not in ENCODERS:
        raise UserError(f"the encoder is {name!r}{known_are(name, ENCODERS)}")
    return ENCODERS[name]


def encode(encoder: Encoder, variables: Variables, pixels: jax.Array, side: int) -> jax.Array:
    """The features, float32 [B, F], of square images, pixels [B, H, W, C] from 0 to 1 with one or three channels.

    `variables` are the encoder's weights for this side, to which the images are resized (bilinearly, as Pillow does).
    """
    pixels = resize(pixels, side)
    normalised = (pixels - jnp.array(encoder.mean)) / jnp.array(encoder.std)  # one channel becomes three equal ones
    features: Any = encoder.module.apply(variables, normalised)
    return features.astype(jnp.float32)
