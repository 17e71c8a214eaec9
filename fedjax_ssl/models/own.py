"""Imports a user's backbone by its import path, adapts it to the library's calls, and checks its shapes.

    --config.model.name=my_package.my_module:MyBackbone
    --config.model.name=path/to/file.py:MyBackbone

Silent mistakes are refused before compilation: statistics that layers other than `Normalisation` store, and statistics
that include padding or other views. docs/how_to/own_backbone.md explains to users what a backbone is.
"""

import inspect
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.imports import import_own, is_own, one_line
from fedjax_ssl.models.normalisation import Normalisation

FIELD = "model.name"
OPTIONAL_ARGUMENTS = ("train", "mask", "num_views")  # of a backbone's __call__, after the images
_NUM_VIEWS, _VIEW_SIZE = 2, 3  # of the batch with which a backbone is checked


class Adapted(nn.Module):
    """Wraps a module that lacks some arguments of a backbone, so that it can be called with all of them.

    This is correct if the module maps each image by itself even in training, because it then has no use for a mask or
    for views. `check_backbone` ensures this only for the library's normalisation.
    """

    module: nn.Module  # from images [B, H, W, C], and the arguments named in `takes` as keywords, to features [B, F]
    takes: tuple[str, ...]  # the arguments of `OPTIONAL_ARGUMENTS` that the module takes

    @property
    def classifier_bias(self):
        """As the module says, see `Heads`."""
        return getattr(self.module, "classifier_bias", True)

    def __call__(self, images, train=False, mask=None, num_views=1):
        """Maps images [V*B, H, W, C] to features [V*B, F]; arguments as in `Heads`."""
        given = {"train": train, "mask": mask, "num_views": num_views}
        return self.module(images, **{name: given[name] for name in self.takes})


def build_backbone(name: str, normalisation: str, dtype: Any, **of_inputs: Any) -> nn.Module:
    """Builds the backbone that an import path names.

    Args:
        name: MODULE:FACTORY or FILE.py:FACTORY. Modules are searched among installed ones, then in the current folder.
          A file's own imports are also searched in its folder.
        normalisation: the policy's name, passed if the factory takes a keyword of this name.
        dtype: dtype of the computation, passed likewise.
        of_inputs: keywords that follow from the kind of inputs, such as `num_tokens` for texts, passed likewise.

    Returns:
        A module that takes (images, train, mask, num_views).

    Raises:
        UserError: nothing has this name, the import or the factory fails, or its result cannot be a backbone.
    """
    factory, file = import_own(FIELD, name)
    with one_line(FIELD, name, "cannot be built", file):
        parameters = inspect.signature(factory).parameters
        anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        keywords = {"normalisation": normalisation, "dtype": dtype, **of_inputs}
        keywords = {key: value for key, value in keywords.items() if anything or key in parameters}
        backbone = factory(**keywords)
    if not isinstance(backbone, nn.Module) or not callable(backbone):
        raise UserError(
            f"model.name={name} gives a {type(backbone).__name__}; it must give a flax.linen.Module with a __call__"
        )
    if "dtype" not in keywords and dtype != jnp.float32:
        raise UserError(f"model.name={name} takes no keyword dtype; set model.dtype to 'float32', or add the keyword")
    return _adapt(name, backbone)


def check_backbone(name: str, backbone: nn.Module, taken: jax.ShapeDtypeStruct, normalisation: str) -> bool:
    """Traces a user's backbone as the library will call it, without computing anything.

    Args:
        name: the backbone's import path, for messages.
        backbone: the result of `build_backbone`.
        taken: shape and dtype of the backbone's input for one example, [1, ...].
        normalisation: the policy's name.

    Returns:
        Whether the backbone has statistics for normalisation.

    Raises:
        UserError: the backbone fails, its output is not [B, F], it calls a `Normalisation` layer wrongly, or it stores
          anything besides parameters and the statistics of `Normalisation` layers.
    """
    layers = []  # (path, policy, arguments) of each call of a `Normalisation` layer

    def watch(call, arguments, keywords, context):
        layer = context.module
        if isinstance(layer, Normalisation) and context.method_name == "__call__":
            bound = inspect.signature(Normalisation.__call__).bind(layer, *arguments, **keywords)
            bound.apply_defaults()
            layers.append((layer.path, layer.policy, bound.arguments))
        return call(*arguments, **keywords)

    shape = taken.shape[1:]
    batch = jax.ShapeDtypeStruct((_NUM_VIEWS * _VIEW_SIZE, *shape), taken.dtype)
    mask = jax.ShapeDtypeStruct(batch.shape[:1], jnp.bool_)
    # The calls that `Heads` makes: in initialisation, in training and in evaluation.
    init = lambda key, x: backbone.init(key, x, False, None, 1)  # noqa: E731
    train = lambda v, x, m: backbone.apply(v, x, True, m, _NUM_VIEWS, mutable=["batch_stats"])[0]  # noqa: E731
    evaluate = lambda v, x: backbone.apply(v, x, False, None, 1)  # noqa: E731
    with nn.intercept_methods(watch):
        with one_line(FIELD, name, f"fails on an example of shape {shape}", _file_of(backbone)):
            variables = jax.eval_shape(init, jax.random.key(0), taken)
        _check_variables(name, variables, {path for path, _, _ in layers})
        in_evaluation = len(layers)
        with one_line(FIELD, name, f"fails in training on examples of shape {shape}", _file_of(backbone)):
            features = jax.eval_shape(train, variables, batch, mask)
    _check_features(name, features, batch.shape[0])
    for number, (path, policy, arguments) in enumerate(layers):
        if policy in ("group", "none"):  # these treat each example by itself, so the arguments do not matter
            continue
        training = number >= in_evaluation
        alone = arguments["mask"] is None or arguments["num_views"] != _NUM_VIEWS
        if policy != normalisation or arguments["train"] is not training or (training and alone):
            raise UserError(
                f"model.name={name}: its Normalisation {_shown(path)} must have the policy of the factory's keyword "
                f"normalisation, {normalisation!r}, and be called with (x, train, mask, num_views), all as the "
                "backbone was given them; or set model.normalisation to 'group'"
            )
    with one_line(FIELD, name, f"fails in evaluation on examples of shape {shape}", _file_of(backbone)):
        features = jax.eval_shape(evaluate, variables, batch)
    _check_features(name, features, batch.shape[0])
    return "batch_stats" in variables


def check_mixtures(name: str, network: Any) -> None:
    """Raises a UserError if a user's backbone cannot take the mixtures of mixup, which for texts are not token ids."""
    if not is_own(name) or not hasattr(network.inputs, "mix"):
        return
    inputs, backbone = network.inputs, network.module.backbone
    example = jax.ShapeDtypeStruct((2, inputs.shape[-1]), jnp.float32)

    def features(key, example):
        variables = backbone.init(key, inputs.to_network(example), False, None, 1)
        mixture = inputs.to_network(inputs.mix(example, example, jnp.float32(1)))
        return [backbone.apply(variables, taken, False, None, 1) for taken in (inputs.to_network(example), mixture)]

    words = "cannot take mixtures, of texts float32 [B, 3, L]; turn mixup off, or set model.name=transformer"
    with one_line(FIELD, name, words, _file_of(backbone)):
        plain, mixed = jax.eval_shape(features, jax.random.key(0), example)
        if mixed.shape != plain.shape:
            raise ValueError(f"features {plain.shape} become {mixed.shape}")


def _check_variables(name: str, variables: dict[str, Any], layers: set[tuple[str, ...]]) -> None:
    """Raises a UserError unless a backbone stores parameters and, besides them, only the statistics of these layers."""
    if set(variables) - {"batch_stats"} != {"params"}:
        kept = ", ".join(sorted(variables)) or "nothing"
        raise UserError(f"model.name={name} keeps {kept}; it must have parameters, which alone survive a training step")
    for keys, _ in jax.tree.leaves_with_path(variables.get("batch_stats", {})):
        path = tuple(key.key for key in keys[:-1])
        if path not in layers:
            raise UserError(
                f"model.name={name} keeps batch statistics of its own in {_shown(path)}; normalise with "
                "fedjax_ssl.models.Normalisation, or with one that keeps none, such as flax.linen.GroupNorm"
            )


def _shown(path: tuple[str, ...]) -> str:
    """A layer's path as the user knows it: without the name that `Adapted` gives the user's module."""
    return "/".join(path[1:] if path[0] == "module" else path)


def _check_features(name: str, features: Any, batch_size: int) -> None:
    """Raises a UserError unless `features` is a floating-point array [batch_size, F]."""
    shape: tuple[int, ...] = getattr(features, "shape", ())
    dtype = getattr(features, "dtype", None)
    if len(shape) != 2 or shape[0] != batch_size or not jnp.issubdtype(dtype, jnp.floating):
        raise UserError(
            f"model.name={name} gives {dtype or type(features).__name__} {shape} for {batch_size} images; a backbone "
            "gives floating-point features [B, F], one row an image, without a classifier"
        )


def _adapt(name: str, backbone: nn.Module) -> nn.Module:
    """Returns the backbone itself if it takes every argument in its place, otherwise an `Adapted` one."""
    parameters = list(inspect.signature(backbone.__call__).parameters.values())
    takes = tuple(parameter.name for parameter in parameters[1:])
    # An argument of another name could mean any of these, or the opposite of one, as 'deterministic' does.
    if not parameters or not set(takes) <= set(OPTIONAL_ARGUMENTS):
        raise UserError(
            f"model.name={name}: its __call__ takes ({', '.join(p.name for p in parameters)}); it must take (images), "
            "(images, train) or (images, train, mask, num_views)"
        )
    if takes == OPTIONAL_ARGUMENTS and all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters):
        return backbone
    return Adapted(backbone, takes)


def _file_of(backbone: nn.Module) -> str:
    """The file in which a backbone's class is defined."""
    return inspect.getfile(type(backbone.module if isinstance(backbone, Adapted) else backbone))
