"""Models: a backbone chosen by name, with a classifier and a method's heads on top.

A backbone's factory is a callable that takes the keywords `normalisation` (policy name) and `dtype` and gives a module
from (images, train, mask, num_views) to features [B, F]. A user's, see `own.py`, may lack some of these. It is named by
its import path, or by a short name if it is added here: `BACKBONES["mine"] = MyBackbone`.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp

from fedjax_ssl.base.errors import UserError, known_are
from fedjax_ssl.base.imports import import_own, is_own
from fedjax_ssl.models.cnn import LeNet, SmallCNN
from fedjax_ssl.models.heads import CLASSIFIER_INITS, Heads, Linear, Outputs, heads_drawn
from fedjax_ssl.models.normalisation import POLICIES, Normalisation
from fedjax_ssl.models.own import Adapted, build_backbone, check_backbone
from fedjax_ssl.models.projectors import Projector
from fedjax_ssl.models.resnet import ResNet
from fedjax_ssl.models.resnet9 import ResNet9
from fedjax_ssl.models.transformer import Transformer
from fedjax_ssl.models.vectors import Mlp, NoBackbone
from fedjax_ssl.models.vit import ViT
from fedjax_ssl.models.wide_resnet import WideResNet

BACKBONES: dict[str, Callable[..., nn.Module]] = {
    "cnn": SmallCNN,
    "lenet": LeNet,  # used by RSCFed
    "resnet8": functools.partial(ResNet, blocks=(1, 1, 1), width=16),
    "resnet9": ResNet9,
    "resnet18": ResNet,
    "resnet18_imagenet": functools.partial(ResNet, imagenet_stem=True),  # SemiAnAgg on skin lesions, CBAFed
    "resnet34": functools.partial(ResNet, blocks=(3, 4, 6, 3)),  # FedLabel on CIFAR-10
    "resnet50": functools.partial(ResNet, blocks=(3, 4, 6, 3), bottleneck=True),  # FedLabel on CIFAR-100
    "wrn16_1": functools.partial(WideResNet, depth=16, width=1),
    "wrn28_2": functools.partial(WideResNet, depth=28, width=2),
    "wrn28_8": functools.partial(WideResNet, depth=28, width=8),  # SemiFL on CIFAR-100
    "vit": ViT,
    "mlp": Mlp,
    "linear": NoBackbone,
    "transformer": Transformer,
}
# The inputs that a backbone takes, by `Kind.noun` of `fedjax_ssl.data.kinds`. Those that are not listed take images.
_TAKE = {
    "mlp": ("images", "feature vectors", "rows"),
    "linear": ("images", "feature vectors", "rows"),
    "transformer": ("texts",),
}

_OF_ANY_WIDTH = (ResNet, ResNet9, Mlp, Transformer, ViT)
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def build_model(config, num_classes, heads=None, taken="images", of_inputs=None):
    """Builds the model, a `Heads`, that a configuration names.

    Args:
        config: the `model` section: `name`, `width`, `normalisation`, `classifier_init` and `dtype`.
        num_classes: number of classes.
        heads: name -> function from the `model` section to the head's factory, see `Heads`; None: no heads.
        taken: what the inputs are called, see `Kind.noun` of `fedjax_ssl.data.kinds`.
        of_inputs: keyword arguments for the backbone's factory that follow from the inputs; None: none.

    Raises:
        UserError: a name is unknown (the message lists the known names), the backbone takes another kind of inputs or
          has a width of its own, or a user's own backbone cannot be built.
    """
    own = is_own(config.name)
    if not own and config.name not in BACKBONES:
        raise UserError(
            f"model.name is {config.name!r}{known_are(config.name, sorted(BACKBONES))}, or your own MODULE:FACTORY, "
            "see docs/how_to/own_backbone.md"
        )
    factory, file = import_own("model.name", config.name) if own else (BACKBONES[config.name], None)
    if not own and taken not in _TAKE.get(config.name, ("images",)):
        fit = [name for name in BACKBONES if taken in _TAKE.get(name, ("images",))]
        raise UserError(f"model.name={config.name} is not for {taken}; those for them: {', '.join([*fit, 'your own'])}")
    dtype = _DTYPES[config.dtype]
    backbone = build_backbone(config.name, factory, file, config.normalisation, dtype, **(of_inputs or {}))
    if config.width and not isinstance(backbone, _OF_ANY_WIDTH):
        raise UserError(f"model.name={config.name} has a width of its own, so leave model.width 0")
    backbone = backbone.clone(width=config.width) if config.width else backbone
    made = {name: make(config) for name, make in (heads or {}).items()}
    return Heads(backbone, num_classes, made, config.classifier_init)
