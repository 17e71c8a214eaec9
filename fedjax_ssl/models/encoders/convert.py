"""Converts PyTorch weights to this library's file format."""

import pathlib
from typing import Any

import numpy as np

from fedjax_ssl.base.errors import UserError, first_line
from fedjax_ssl.models.encoders.encoder import find_encoder
from fedjax_ssl.models.encoders.weights import save_weights


def convert(source: pathlib.Path, name: str, out: pathlib.Path) -> int:
    """Converts PyTorch weights of the encoder `name` to a file NAME.safetensors; returns the number of arrays.

    The source is a FILE.safetensors, or another file of tensors if PyTorch is installed. Its names are those of timm,
    torchvision, or the repositories of DINOv2 or CLIP. Raises a UserError if the file cannot be read, or does not hold
    this encoder's weights.
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
    from safetensors import SafetensorError, numpy

    try:
        if source.suffix == ".safetensors":
            return numpy.load_file(source)
        import torch
    except (SafetensorError, OSError, KeyError) as error:
        raise UserError(f"{source} is not a safetensors file ({first_line(error)})") from error
    except ImportError as error:
        raise UserError(f"reading {source} takes PyTorch: pip install 'fedjax_ssl[torch]'") from error
    try:
        state = torch.load(source, map_location="cpu", weights_only=True)  # runs no code of the file
        for key in ("state_dict", "model", "teacher"):
            state = state[key] if isinstance(state.get(key), dict) else state
        return {name: value.detach().numpy() for name, value in state.items() if isinstance(value, torch.Tensor)}
    except Exception as error:  # of any type; PyTorch's text would advise to run the file's code
        raise UserError(f"PyTorch cannot read tensors alone from {source} ({type(error).__name__})") from error
