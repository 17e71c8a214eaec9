"""The export formats, and `export_run`, which writes one of them."""

import functools
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from fedjax_ssl.base.devices import platform
from fedjax_ssl.base.errors import UserError, known_are
from fedjax_ssl.base.files import expanded, replaced, writing
from fedjax_ssl.base.imports import name_of
from fedjax_ssl.records.sealed import read_dataset
from fedjax_ssl.records.words import describe_model
from fedjax_ssl.records.workdir import read_config
from fedjax_ssl.serve.export import check, hub, programs
from fedjax_ssl.serve.predictor import NEWEST, Predictor, load

# Facts of the data set that are not about the model's inputs, or are elsewhere in the exported facts. Its checksums are
# not for others: with them anyone can confirm a guess of the data.
_NOT_OF_INPUTS = ("content", "name", "num_classes", "class_names", "flip", "num_train", "num_test", "files")


def safetensors(predictor: Predictor, facts: Mapping[str, Any]) -> bytes:
    """Parameters and normalisation statistics, as `params.LAYER.NAME` and `batch_stats.LAYER.NAME`; facts as metadata.

    Kernels of convolutions are [height, width, in, out], of dense layers [in, out]; float32.
    """
    from safetensors.numpy import save

    trees = {"params": predictor.params, "batch_stats": predictor.batch_stats}
    metadata = {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}
    return save({name: np.array(leaf, order="C") for name, leaf in flatten_dict(trees, sep=".").items()}, metadata)


# Format -> (predictor, facts) -> the file's bytes; and what runs them, see `check.checked`. 'hub' is a folder.
FILES: dict[str, tuple[Callable[..., bytes], Callable[..., check.Run]]] = {
    "safetensors": (safetensors, check.run_tensors),
    "stablehlo": (lambda predictor, facts: programs.stablehlo(predictor), check.run_stablehlo),
    "onnx": (programs.onnx, check.run_onnx),
}
FORMATS = (*FILES, "hub")


def export_run(
    workdir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    format: str,
    allow_code: bool = False,
    license: str = "unknown",
    checkpoint: str = NEWEST,
) -> pathlib.Path:
    """Writes the model of a run's newest or best checkpoint.

    Args:
        out: the file to write; for 'hub' a folder, which may exist.
        format: one of `FORMATS`.
        allow_code, checkpoint: see `fedjax_ssl.load`.
        license: of the model, for the card of 'hub': an identifier of the Hugging Face Hub, such as 'apache-2.0'.

    Raises:
        UserError: the format is unknown, its package is missing or cannot hold this model, see `check.checked`, the
            run cannot be loaded, or the file cannot be written. Nothing has been written then.
    """
    if format not in FORMATS:
        raise UserError(f"--format is {format!r}{known_are(format, FORMATS)}")
    path = expanded(out)
    if format == "hub":
        hub.check_folder(path)
    if format == "onnx":
        programs.import_jax2onnx()  # before anything slow
    run = expanded(workdir)
    predictor = load(run, allow_code, checkpoint)
    inputs, facts = check.random_inputs(predictor), _facts(run, predictor)
    # GPUs multiply in TF32, and bfloat16 has 8 bits.
    rounding = 0.01 if platform() == "cpu" and facts["dtype"] == "float32" else 0.1
    files = {}
    for each in ("safetensors", "stablehlo") if format == "hub" else (format,):
        write, runs = FILES[each]
        files[each] = check.checked(each, functools.partial(write, facts=facts), runs, predictor, inputs, rounding)
    contents = hub.contents(run, facts, files, license) if format == "hub" else {path.name: files[format]}
    folder = path if format == "hub" else path.parent
    with writing(path):
        folder.mkdir(exist_ok=True)
        for name, content in contents.items():
            with replaced(folder / name) as file:
                file.write(content)
    return path


def _facts(folder: pathlib.Path, predictor: Predictor) -> dict[str, Any]:
    """What a user of the parameters must know, for JSON, see docs/how_to/export.md."""
    config, dataset = read_config(folder), read_dataset(folder)
    return {
        "library": "fedjax_ssl",
        "method": name_of(config["method"]),
        "backbone": describe_model(config),
        "normalisation": config["model"]["normalisation"],
        "dtype": config["model"]["dtype"],
        "data": dataset.get("name", config["data"]["source"]),
        **{name: value for name, value in dataset.items() if name not in _NOT_OF_INPUTS},  # their kind, shape, scale
        "class_names": list(predictor.class_names),
        "round": predictor.round,
    }
