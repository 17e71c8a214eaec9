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
from fedjax_ssl.base.imports import import_own, one_line
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
    """Builds the backbone that an import path names: a module that takes (images, train, mask, num_views).

    The name is MODULE:FACTORY or FILE.py:FACTORY. Modules are searched among installed ones, then in the current
    folder; a file's own imports are also searched in its folder. The policy's name, the dtype of the computation and
    keywords that follow from the kind of inputs, such as `num_tokens` for texts, are passed if the factory takes a
    keyword of this name.

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
    if "dtype" not in keywords and dtype != jnp.float32:
        raise UserError(f"model.name={name} takes no keyword dtype; set model.dtype to 'float32', or add the keyword")
    is_module = isinstance(backbone, nn.Module) and callable(backbone)
    arguments = list(inspect.signature(backbone.__call__).parameters.values()) if is_module else []
    takes = tuple(argument.name for argument in arguments[1:])
    # An argument of another name could mean any of these, or the opposite of one, as 'deterministic' does.
    if not arguments or not set(takes) <= set(OPTIONAL_ARGUMENTS):
        raise UserError(
            f"model.name={name} gives a {type(backbone).__name__} that takes "
            f"({', '.join(argument.name for argument in arguments)}); a backbone is a flax.linen.Module that takes "
            "(images), (images, train) or (images, train, mask, num_views)"
        )
    in_place = takes == OPTIONAL_ARGUMENTS and all(a.kind is a.POSITIONAL_OR_KEYWORD for a in arguments)
    return backbone if in_place else Adapted(backbone, takes)


def check_backbone(name: str, backbone: nn.Module, taken: jax.ShapeDtypeStruct, normalisation: str) -> bool:
    """Traces the calls that `Heads` will make of a user's backbone, without computing anything.

    `taken` is the shape and dtype of the backbone's input for one example, [1, ...].

    Returns:
        Whether the backbone has statistics for normalisation.

    Raises:
        UserError: the backbone fails, its output is not [B, F], it calls a `Normalisation` layer wrongly, or it stores
            anything besides parameters and the statistics of `Normalisation` layers.
    """
    calls = []  # (path, policy, arguments) of each call of a `Normalisation` layer
    file = inspect.getfile(type(backbone.module if isinstance(backbone, Adapted) else backbone))
    batch = jax.ShapeDtypeStruct((_NUM_VIEWS * _VIEW_SIZE, *taken.shape[1:]), taken.dtype)
    mask = jax.ShapeDtypeStruct(batch.shape[:1], jnp.bool_)

    def watch(call, arguments, keywords, context):
        layer = context.module
        if isinstance(layer, Normalisation) and context.method_name == "__call__":
            bound = inspect.signature(Normalisation.__call__).bind(layer, *arguments, **keywords)
            bound.apply_defaults()
            calls.append((layer.path, layer.policy, bound.arguments))
        return call(*arguments, **keywords)

    def traced(when, function, *arguments):
        with nn.intercept_methods(watch), one_line(FIELD, name, f"fails {when} for {taken.shape[1:]}", file):
            return jax.eval_shape(function, *arguments)

    init = lambda key, x: backbone.init(key, x, False, None, 1)  # noqa: E731
    train = lambda v, x, m: backbone.apply(v, x, True, m, _NUM_VIEWS, mutable=["batch_stats"])[0]  # noqa: E731
    evaluate = lambda v, x: backbone.apply(v, x, False, None, 1)  # noqa: E731
    variables = traced("to start", init, jax.random.key(0), taken)
    _check_variables(name, variables, {path for path, _, _ in calls})
    _check_features(name, traced("in evaluation", evaluate, variables, batch), len(mask))
    in_evaluation = len(calls)
    _check_features(name, traced("in training", train, variables, batch, mask), len(mask))
    for number, (path, policy, arguments) in enumerate(calls):
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
    return "batch_stats" in variables


def _check_variables(name: str, variables: dict[str, Any], layers: set[tuple[str, ...]]) -> None:
    """Raises a UserError unless a backbone stores parameters and, besides them, only the statistics of these layers."""
    of_layers = {
        tuple(key.key for key in keys[:-1]) for keys, _ in jax.tree.leaves_with_path(variables.get("batch_stats", {}))
    }
    kept = [kind for kind in variables if kind != "batch_stats"] + [
        f"batch_stats of {_shown(path)}" for path in of_layers - layers
    ]
    if kept != ["params"]:
        raise UserError(
            f"model.name={name} keeps {', '.join(sorted(kept)) or 'nothing'}; it must keep parameters, and besides "
            "them only the statistics of fedjax_ssl.models.Normalisation; flax.linen.GroupNorm needs no statistics"
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
