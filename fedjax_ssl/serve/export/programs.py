"""Exports the network as a program: stored examples, such as uint8 images [B, H, W, C] -> probabilities [B, C].

Probabilities are float32.
"""

import functools
import itertools
import json
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from fedjax_ssl.base.devices import use_platform
from fedjax_ssl.base.errors import UserError, first_line
from fedjax_ssl.data.kinds import IMAGE, kind_name
from fedjax_ssl.models.substitution import evaluate
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

    Raises a UserError if jax2onnx is not installed, or cannot convert the model.
    """
    jax2onnx = import_jax2onnx()
    if facts.get("dtype", "float32") != "float32":
        raise UserError(f"model.dtype is {facts['dtype']}, and ONNX Runtime has no such convolution; export stablehlo")
    images = _any_number(predictor)
    try:
        with use_platform(_PLAIN):
            traced = jax.make_jaxpr(_fresh(predictor))(images)  # here, because jax2onnx replaces layers of Flax
        name = "images" if kind_name(predictor.facts) == IMAGE else "inputs"
        inlined = lambda images: evaluate(traced.jaxpr, traced.consts, images, forms=_FORMS)[0]  # noqa: E731
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


# What ONNX does not have, or jax2onnx makes badly; see `substitution.evaluate`.


def _inlined(*given: Any, jaxpr: Any = None, call: Any = None, call_jaxpr: Any = None, **_: Any) -> list[Any]:
    """The result of a call that only adds rules for derivatives or vmap to a function."""
    inner = jaxpr or call or call_jaxpr
    return evaluate(inner.jaxpr, inner.consts, *given, forms=_FORMS)


def _pooling(join: Any, outside: float) -> Callable[..., list[Any] | None]:
    """Pooling as slices, one for each place of the window, joined; jax2onnx pools channels, which ONNX Runtime refuses.

    `outside` is the number of the padding.
    """

    def form(x: Any, *, window_dimensions: Any, window_strides: Any, padding: Any, base_dilation: Any, **others: Any):
        if max(base_dilation + others["window_dilation"]) > 1:
            return None
        x = jnp.pad(x, padding, constant_values=outside) if max(map(max, padding)) else x
        reach = [(size - window) // stride * stride + 1
                 for size, window, stride in zip(x.shape[1:], window_dimensions[1:], window_strides[1:])]  # fmt: skip
        places = itertools.product(*map(range, window_dimensions[1:]))
        cuts = [[slice(p, p + r, s) for p, r, s in zip(place, reach, window_strides[1:])] for place in places]
        return [functools.reduce(join, (x[:, *cut] for cut in cuts))]

    return form


_FORMS = {
    **dict.fromkeys(("jit", "custom_vmap_call", "custom_vjp_call", "custom_jvp_call"), _inlined),
    "reduce_window_max": _pooling(jnp.maximum, -jnp.inf),
    "reduce_window_sum": _pooling(jnp.add, 0.0),
}
