"""Runs an export once, on random inputs, and compares it with the predictor before anything is written."""

from collections.abc import Callable

import jax
import jax.export
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjax_ssl.base.errors import UserError, first_line
from fedjax_ssl.data.kinds import IMAGE, kind_name
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.serve.predictor import BATCH_SIZE, Predictor, in_batches

Write = Callable[[Predictor], bytes]
Run = Callable[[np.ndarray], np.ndarray]  # stored examples [B, ...] -> float32 [B, ...]


def run_tensors(content: bytes, predictor: Predictor) -> Run:
    """Runs the predictor's network with the arrays of a safetensors file."""
    from safetensors.numpy import load

    arrays = load(content)
    params, batch_stats = (
        unflatten_dict({path: arrays[".".join([kind, *path])] for path in flatten_dict(tree or {})})
        for kind, tree in predictor.model._asdict().items()
    )
    model = Model(params, batch_stats)
    return lambda inputs: np.asarray(jax.jit(predictor.network.probabilities)(model, inputs))


def run_stablehlo(content: bytes, predictor: Predictor) -> Run:
    """Runs a StableHLO module on this machine."""
    del predictor
    loaded = jax.export.deserialize(bytearray(content))
    return lambda inputs: np.asarray(loaded.call(inputs))


def run_onnx(content: bytes, predictor: Predictor) -> Run:
    """Runs an ONNX model with ONNX Runtime."""
    import onnxruntime

    del predictor
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what fails is raised, too
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    (name,) = (taken.name for taken in session.get_inputs())
    return lambda inputs: session.run(None, {name: inputs})[0]


def checked(
    format: str, write: Write, run: Callable[..., Run], predictor: Predictor, inputs: np.ndarray, rounding: float
) -> bytes:
    """The bytes of an export, once run by `run`: (bytes, predictor) -> a function from inputs to probabilities.

    `rounding` is the relative difference that rounding may make. Raises a UserError if the export cannot be made or
    run, or its outputs differ from the predictor's.
    """
    expected, wrong = in_batches(predictor.outputs, inputs, BATCH_SIZE)[0], ""
    try:
        content = write(predictor)
        found = run(content, predictor)(inputs)
        most = np.max(np.abs(expected), where=np.isfinite(expected), initial=0)
        if not np.allclose(found, expected, rtol=rounding, atol=rounding / 10 * most, equal_nan=True):
            wrong = f"its outputs differ from the predictor's by up to {np.nanmax(np.abs(found - expected)):.2g}"
    except UserError as error:
        wrong = str(error)
    except Exception as error:  # the converters and runtimes have errors of many types
        wrong = f"{type(error).__name__}: {first_line(error)[:300]}"
    if wrong:
        raise UserError(f"{format} cannot hold this model: {wrong}; nothing was written")
    return content


def random_inputs(predictor: Predictor) -> np.ndarray:
    """`BATCH_SIZE` random examples, as the data set stores them."""
    draw, shape = np.random.default_rng(0), (BATCH_SIZE, *predictor.shape)
    if kind_name(predictor.facts) == IMAGE or "num_tokens" in predictor.facts:
        return draw.integers(0, predictor.facts.get("num_tokens", 256), shape).astype(predictor.kind.stored)
    return draw.normal(size=shape).astype(predictor.kind.stored)
