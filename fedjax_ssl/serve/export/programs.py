"""Exports the network as a program: stored examples, such as uint8 images [B, H, W, C] -> probabilities [B, C].

Probabilities are float32.
"""

import functools
import itertools
import json
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax.extend.core import Literal

from fedjax_ssl.base.devices import use_platform
from fedjax_ssl.base.errors import UserError, first_line
from fedjax_ssl.data.kinds import IMAGE, kind_name
from fedjax_ssl.serve.predictor import Predictor

PLATFORMS = ("cpu", "cuda", "tpu")
# The platform whose convolutions have the plain form, which every platform and format supports.
_PLAIN = "gpu"


def stablehlo(predictor: Predictor) -> bytes:
    """A StableHLO module for CPU, CUDA and TPU, as `jax.export.deserialize` reads it; the parameters are constants."""
    with use_platform(_PLAIN):
        exported = jax.export.export(jax.jit(_fresh(predictor)), platforms=PLATFORMS)(_any_number(predictor))
    return bytes(exported.serialize())


def onnx(predictor: Predictor, facts: Mapping[str, Any]) -> bytes:
    """An ONNX model with the input `images`, or `inputs`, and the output `probabilities`; facts as its metadata.

    Raises:
        UserError: jax2onnx is not installed, or cannot convert the model.
    """
    jax2onnx = import_jax2onnx()
    if facts.get("dtype", "float32") != "float32":
        raise UserError(f"model.dtype is {facts['dtype']}, and ONNX Runtime has no such convolution; export stablehlo")
    images = _any_number(predictor)
    try:
        with use_platform(_PLAIN):
            inlined = _inlined(_fresh(predictor), images)
        name = "images" if kind_name(predictor.facts) == IMAGE else "inputs"
        model = jax2onnx.to_onnx(inlined, [images], input_names=[name], output_names=["probabilities"])
    except Exception as error:  # of any type: jax2onnx raises misleading errors for what it does not support
        raise UserError(f"jax2onnx cannot convert this model ({type(error).__name__}: {first_line(error)})") from error
    for name, value in facts.items():
        model.metadata_props.add(key=name, value=value if isinstance(value, str) else json.dumps(value))
    return bytes(model.SerializeToString())


def import_jax2onnx() -> types.ModuleType:
    """Imports the package that converts to ONNX; raises a UserError if it is not installed."""
    try:
        import jax2onnx
        import onnxruntime  # noqa: F401 (the check of the export runs it)
    except ImportError as error:
        needed = "--format=onnx needs the packages jax2onnx and onnxruntime: pip install 'fedjax_ssl[onnx]'"
        raise UserError(f"{needed} ({first_line(error)})") from error
    return jax2onnx


def _any_number(predictor: Predictor) -> jax.ShapeDtypeStruct:
    """The shape of examples, with a symbolic batch size."""
    shape = jax.export.symbolic_shape(", ".join(["batch", *map(str, predictor.shape)]))
    return jax.ShapeDtypeStruct(shape, predictor.kind.stored)


def _fresh(predictor: Predictor) -> Callable[[jax.Array], jax.Array]:
    """The function to export, a new one each time, because JAX would reuse what it has traced for another platform."""

    def probabilities(images):
        return predictor.network.probabilities(predictor.model, images)

    try:
        jax.eval_shape(lambda images: probabilities(images), _any_number(predictor))
    except Exception:  # a user's backbone may compute with the number of images, such as len(images)
        return jax.vmap(lambda image: probabilities(image[None])[0])
    return probabilities


# Calls that only add rules for derivatives or vmap to a function; ONNX has none -> the parameter with the function.
_CALLS = {"jit": "jaxpr", "custom_vmap_call": "call", "custom_vjp_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}


# jax2onnx's form of these pools channels as well, which ONNX Runtime refuses -> how values are joined; the padding.
_POOLING: dict[str, tuple[Any, float]] = {
    "reduce_window_max": (jnp.maximum, -jnp.inf),
    "reduce_window_sum": (jnp.add, 0.0),
}


def _pooled(x: Any, join: Any, outside: float, *, window_dimensions: Any, window_strides: Any, padding: Any, **_: Any):
    """Pooling as slices of x, one for each place of the window."""
    x = jnp.pad(x, padding, constant_values=outside) if max(map(max, padding)) else x
    reach = [(size - window) // stride * stride + 1
             for size, window, stride in zip(x.shape[1:], window_dimensions[1:], window_strides[1:])]  # fmt: skip
    places = itertools.product(*map(range, window_dimensions[1:]))
    cuts = [[slice(p, p + r, s) for p, r, s in zip(place, reach, window_strides[1:])] for place in places]
    return functools.reduce(join, (x[:, *cut] for cut in cuts))


def _inlined(
    function: Callable[[jax.Array], jax.Array], images: jax.ShapeDtypeStruct
) -> Callable[[jax.Array], jax.Array]:
    """The function for such images, without inner calls; traced here, because jax2onnx replaces layers of Flax."""
    traced = jax.make_jaxpr(function)(images)
    return lambda images: _evaluate(traced.jaxpr, traced.consts, [images])[0]


def _evaluate(jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments]))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        given, primitive = list(map(read, equation.invars)), equation.primitive
        inner = equation.params.get(_CALLS.get(primitive.name, ""))
        if inner is not None:
            results = _evaluate(inner.jaxpr, inner.consts, given)
        elif (
            primitive.name in _POOLING
            and max(equation.params["base_dilation"] + equation.params["window_dilation"]) == 1
        ):
            results = [_pooled(given[0], *_POOLING[primitive.name], **equation.params)]
        else:
            found = primitive.bind(*given, **primitive.get_bind_params(equation.params))
            results = found if primitive.multiple_results else [found]
        values.update(zip(equation.outvars, results))
    return list(map(read, jaxpr.outvars))
