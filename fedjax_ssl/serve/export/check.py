"""Runs an export once, on test inputs of the run, and compares it with the predictor before anything is written."""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.export
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjax_ssl.base.errors import UserError, first_line, say
from fedjax_ssl.config import typed
from fedjax_ssl.data.kinds import IMAGE, kind_name
from fedjax_ssl.data.sources import load_dataset
from fedjax_ssl.models.network import Network
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.records.workdir import CONFIG, read_config
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
    run, or its outputs differ from the predictor's; the line names the first layer with a wrong output, if the format
    holds programs.
    """

    def tried(predictor: Predictor, expected: np.ndarray) -> tuple[bytes, str]:
        """An export's bytes, and what is wrong with them, in words; '' if they give the expected outputs."""
        try:
            content = write(predictor)
            found = run(content, predictor)(inputs)
        except UserError as error:
            return b"", str(error)
        except Exception as error:  # the converters and runtimes have errors of many types
            return b"", f"{type(error).__name__}: {first_line(error)[:300]}"
        most = np.max(np.abs(expected), where=np.isfinite(expected), initial=0)
        if np.allclose(found, expected, rtol=rounding, atol=rounding / 10 * most, equal_nan=True):
            return content, ""
        return b"", f"its outputs differ from the predictor's by up to {np.nanmax(np.abs(found - expected)):.2g}"

    content, wrong = tried(predictor, in_batches(predictor.outputs, inputs, BATCH_SIZE)[0])
    if not wrong:
        return content
    where = "" if run is run_tensors else _first_wrong_layer(tried, predictor, inputs)
    raise UserError(f"{format} cannot hold this model: {wrong}{where}; nothing was written")


class _UpTo(NamedTuple):
    """A network that ends with a layer, in place of the whole one."""

    network: Network
    layer: str

    @property
    def inputs(self) -> Any:
        return self.network.inputs

    def probabilities(self, model: Model, inputs: jax.Array) -> jax.Array:
        return self.network.layers(model, inputs)[self.layer]


def _first_wrong_layer(tried: Callable[..., tuple[bytes, str]], predictor: Predictor, inputs: np.ndarray) -> str:
    """Where an export begins to be wrong, in words; '' if every layer alone is right."""
    network, model = predictor.network, predictor.model
    layers: list[str] = []
    jax.eval_shape(lambda images: layers.extend(network.layers(model, images)), inputs)  # JAX would sort a result

    def is_wrong(layer: str) -> bool:
        part = _UpTo(network, layer)
        expected = np.asarray(jax.jit(part.probabilities)(model, inputs))
        return bool(tried(predictor._replace(network=cast(Any, part)), expected)[1])

    right, wrong = -1, len(layers)
    while wrong - right > 1:  # a layer after a wrong one is wrong, too
        middle = (right + wrong) // 2
        right, wrong = (right, middle) if is_wrong(layers[middle]) else (middle, wrong)
    if wrong == len(layers):
        return ""
    before = f"; the layer {layers[right]} and all before it are right" if right >= 0 else ""
    return f" (from the layer {layers[wrong]} on{before})"


def test_inputs(predictor: Predictor, folder: pathlib.Path) -> np.ndarray:
    """At most `BATCH_SIZE` test examples of a run; if its data cannot be read, warns and draws numbers."""
    facts = predictor.facts
    try:
        inputs = load_dataset(typed(read_config(folder), folder / CONFIG).data).x_test
        inputs = inputs[np.linspace(0, len(inputs) - 1, min(len(inputs), BATCH_SIZE)).astype(int)]  # of all classes
        if predictor.encode is not None:
            inputs = predictor.encode(inputs)
        if "weak_views" in facts and inputs.ndim == 3:
            inputs = inputs[:, 0]  # the first view represents an example
        if inputs.shape[1:] != predictor.shape:
            raise UserError(f"its examples are {inputs.shape[1:]} now")
        return inputs
    except (UserError, OSError) as error:
        say(f"warning: compared on random inputs, since the run's data cannot be read ({error})")
    draw, shape = np.random.default_rng(0), (BATCH_SIZE, *predictor.shape)
    if kind_name(facts) == IMAGE or "num_tokens" in facts:
        return draw.integers(0, facts.get("num_tokens", 256), shape).astype(predictor.kind.stored)
    return draw.normal(size=shape).astype(predictor.kind.stored)
