"""Converts PyTorch weights to this library's file format. This process runs no pickle."""

import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

from fedjax_ssl.base.errors import UserError, first_line
from fedjax_ssl.models.encoders.encoder import find_encoder
from fedjax_ssl.models.encoders.weights import save_weights

# Runs in its own process, with PyTorch's restricted unpickler, which makes only tensors and containers.
_AS_SAFETENSORS = """
import sys, torch
from safetensors.torch import save_file
state = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
for key in ("state_dict", "model", "teacher"):
    state = state.get(key, state) if isinstance(state.get(key), dict) else state
tensors = {name: value.clone().contiguous() for name, value in state.items() if isinstance(value, torch.Tensor)}
save_file(tensors, sys.argv[2])
"""
_PICKLED = (".pth", ".pt", ".bin")


def convert(source: pathlib.Path, name: str, out: pathlib.Path) -> int:
    """Converts PyTorch weights to a weights file.

    Args:
        source: FILE.safetensors, or .pth, .pt or .bin if PyTorch is installed. Names are those of timm, torchvision, or
            the repositories of DINOv2 or CLIP.
        name: name of the encoder.
        out: the file to write, NAME.safetensors.

    Returns:
        The number of arrays written.

    Raises:
        UserError: the file cannot be read, or does not hold this encoder's weights.
    """
    encoder = find_encoder(name)
    if out.suffix != ".safetensors" or out.resolve() == source.resolve():
        raise UserError(f"--out={out} must end in .safetensors, and not be the file that is read")
    weights = {}
    for theirs, array in read(source).items():
        try:
            found = encoder.translate(theirs, array)
        except (ValueError, IndexError) as error:  # wrong shape, or no such block or layer
            raise UserError(f"{source}: {theirs} of shape {np.shape(array)} is not {name}'s") from error
        if found is not None:
            weights[found[0]] = np.asarray(found[1], np.float32)
    save_weights(out, encoder, weights)
    return len(weights)


def read(source: pathlib.Path) -> dict[str, Any]:
    """Reads PyTorch's arrays by name."""
    if source.suffix == ".safetensors":
        return _read_safetensors(source)
    if source.suffix not in _PICKLED:
        raise UserError(f"{source} must end in .safetensors, {', '.join(_PICKLED)}")
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "weights.safetensors"
        command = [sys.executable, "-I", "-c", _AS_SAFETENSORS, str(source.resolve()), str(copy)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return _read_safetensors(copy)
    lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
    if any("No module named 'torch'" in line for line in lines):
        raise UserError(f"reading {source} takes PyTorch: pip install 'fedjax_ssl[torch]'")
    why = next((line for line in lines if "Error" in line), lines[-1])
    raise UserError(f"PyTorch cannot read tensors alone from {source} ({why.strip()[:200]})")


def _read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            return {name: file.get_tensor(name) for name in sorted(file.keys())}
    except (SafetensorError, OSError, TypeError) as error:
        raise UserError(f"{path} is not a safetensors file ({first_line(error)})") from error
