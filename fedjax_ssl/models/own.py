"""Builds a user's backbone, adapts it to the library's calls, and checks its shapes.

    --config.model.name=my_package.my_module:MyBackbone
    --config.model.name=path/to/file.py:MyBackbone

Silent mistakes are refused before compilation: statistics of other layers than batch normalisation, and statistics that
include padding or other views. docs/how_to/own_backbone.md explains to users what a backbone is.
"""

import functools
import inspect
import math
import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.imports import one_line
from fedjax_ssl.models.normalisation import EPSILON, MOMENTUM, Normalisation

FIELD = "model.name"
OPTIONAL_ARGUMENTS = ("train", "mask", "num_views")  # of a backbone's __call__, after the images
_NUM_VIEWS, _VIEW_SIZE = 2, 3  # of the batch with which a backbone is checked


class Adapted(nn.Module):
    """A user's module as a backbone, with the parameters of the module.

    It passes the arguments on that the module takes. This is correct if a module that lacks some of them maps each
    image by itself even in training, because it then has no use for a mask or for views. `check_backbone` ensures this
    for layers of normalisation.
    """

    module: nn.Module  # from images [B, H, W, C], and the arguments named in `takes` as keywords, to features [B, F]
    takes: tuple[str, ...]  # the arguments of `OPTIONAL_ARGUMENTS` that the module takes
    normalisation: str  # policy of its `flax.linen.BatchNorm`

    def setup(self):
        nn.share_scope(self, self.module)

    @property
    def classifier_bias(self):
        """As the module says, see `Heads`."""
        return getattr(self.module, "classifier_bias", True)

    def __call__(self, images, train=False, mask=None, num_views=1):
        """Maps images [V*B, H, W, C] to features [V*B, F]; arguments as in `Heads`."""
        given = {"train": train, "mask": mask, "num_views": num_views}
        with nn.intercept_methods(functools.partial(_batch_normalise, self.normalisation, given)):
            return self.module(images, **{name: given[name] for name in self.takes})


def _batch_normalise(policy, given, call, arguments, keywords, context):
    """Lets each `flax.linen.BatchNorm` be a `Normalisation` with the same variables: views and padding are apart.

    An interceptor of Flax. Raises ValueError if the layer asks for something that `Normalisation` does not do.
    """
    layer = context.module
    if type(layer) is not nn.BatchNorm or context.method_name != "__call__":
        return call(*arguments, **keywords)
    asked = inspect.signature(nn.BatchNorm.__call__).bind(layer, *arguments, **keywords).arguments
    running = nn.merge_param("use_running_average", layer.use_running_average, asked.get("use_running_average"))
    needed = {
        "model.normalisation 'running' or 'static'": policy in ("running", "static"),
        "use_running_average=not train": running is (not given["train"]),
        f"momentum={1 - MOMENTUM}, or model.normalisation='static'": policy != "running"
        or math.isclose(layer.momentum, 1 - MOMENTUM),
        f"epsilon={EPSILON}": layer.epsilon == EPSILON,
        "the last axis": layer.axis in (-1, asked["x"].ndim - 1),
        "both scale and bias or neither": layer.use_scale == layer.use_bias,
        "no mask and no axis_name": asked.get("mask") is None and layer.axis_name is None,
        "parameters in float32": layer.param_dtype == jnp.float32,
    }
    if missing := [what for what, fulfilled in needed.items() if not fulfilled]:
        raise ValueError(f"{layer.name} needs {', '.join(missing)}")
    if layer.is_initializing():
        return call(*arguments, **keywords)
    x = asked["x"].astype(layer.dtype or jnp.promote_types(asked["x"].dtype, jnp.float32))
    # Flax binds a module to any scope that is its parent, here that of the layer; its types name modules alone.
    return Normalisation(policy, layer.use_scale, parent=layer.scope)(x, **given)  # type: ignore[arg-type]


def build_backbone(name: str, factory: Any, file: str | None, normalisation: str, dtype: Any, **of_inputs: Any) -> Any:
    """Builds a backbone: a module that takes (images, train, mask, num_views), a user's as `Adapted`.

    Args:
        name: the model's name; `file` is the user's file that the factory comes from, or None. Both are for messages.
        factory: a class or function. It gets those of the next arguments that it has keywords for.
        normalisation, dtype, of_inputs: the policy's name, the dtype of the computation, and what follows from the kind
            of inputs, such as `num_tokens` for texts.

    Raises:
        UserError: the factory fails, or its result cannot be a backbone.
    """
    with one_line(FIELD, name, "cannot be built", file):
        parameters = inspect.signature(factory).parameters
        anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        keywords = {"normalisation": normalisation, "dtype": dtype, **of_inputs}
        keywords = {key: value for key, value in keywords.items() if anything or key in parameters}
        backbone = factory(**keywords)
    if type(backbone).__module__.startswith("fedjax_ssl."):
        return backbone
    if "dtype" not in keywords and dtype != jnp.float32:
        raise UserError(f"model.name={name} takes no keyword dtype; set model.dtype to 'float32', or add the keyword")
    is_module = isinstance(backbone, nn.Module) and callable(backbone)
    arguments = list(inspect.signature(backbone.__call__).parameters) if is_module else []
    # An argument of another name could mean any of these, or the opposite of one, as 'deterministic' does.
    if not arguments or not set(arguments[1:]) <= set(OPTIONAL_ARGUMENTS):
        raise UserError(
            f"model.name={name} gives a {type(backbone).__name__} that takes ({', '.join(arguments)}); a backbone is a "
            "flax.linen.Module that takes (images), (images, train) or (images, train, mask, num_views)"
        )
    return Adapted(backbone, tuple(arguments[1:]), normalisation)


def check_backbone(name: str, backbone: Adapted, taken: jax.ShapeDtypeStruct, normalisation: str) -> bool:
    """Traces the calls that `Heads` will make of a user's backbone; returns whether it has statistics of normalisation.

    `taken` is the shape and dtype of the backbone's input for one example, [1, ...].

    Raises:
        UserError: the backbone fails, its output is not [B, F], it calls a layer of batch normalisation wrongly, or
            it stores anything besides parameters and the statistics of these layers.
    """
    calls = []  # (path, policy, arguments) of each call of a `Normalisation` layer
    file = getattr(sys.modules.get(type(backbone.module).__module__), "__file__", None)  # a notebook has none
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
    features = traced("in evaluation", evaluate, variables, batch)
    _check_variables(name, variables, {path for path, _, _ in calls})
    _check_features(name, features, len(mask))
    in_evaluation = len(calls)
    _check_features(name, traced("in training", train, variables, batch, mask), len(mask))
    for number, (path, policy, arguments) in enumerate(calls):
        if policy in ("group", "none"):  # these treat each example by itself, so the arguments do not matter
            continue
        training = number >= in_evaluation
        given = arguments["mask"] is not None and arguments["num_views"] == _NUM_VIEWS
        alone = not given or len(arguments["x"]) != len(mask)
        if policy != normalisation or arguments["train"] is not training or (training and alone):
            raise UserError(
                f"model.name={name}: its Normalisation {'/'.join(path)} must have the policy of the factory's keyword "
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
        f"batch_stats of {'/'.join(path)}" for path in of_layers - layers
    ]
    if kept != ["params"]:
        raise UserError(
            f"model.name={name} keeps {', '.join(sorted(kept)) or 'nothing'}; it must keep parameters, and besides "
            "them only the statistics of fedjax_ssl.models.Normalisation or flax.linen.BatchNorm"
        )


def _check_features(name: str, features: Any, batch_size: int) -> None:
    """Raises a UserError unless `features` is a floating-point array [batch_size, F]."""
    shape: tuple[int, ...] = getattr(features, "shape", ())
    dtype = getattr(features, "dtype", None)
    if len(shape) != 2 or shape[0] != batch_size or not jnp.issubdtype(dtype, jnp.floating):
        raise UserError(
            f"model.name={name} gives {dtype or type(features).__name__} {shape} for {batch_size} images; a backbone "
            "gives floating-point features [B, F], one row an image, without a classifier"
        )
