"""Files of an encoder's weights: safetensors, float32, with names such as 'params/block0/qkv/kernel'."""

import hashlib
import math
import pathlib
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjax_ssl.base.errors import UserError, first_line
from fedjax_ssl.base.files import replaced, writing
from fedjax_ssl.models.encoders.encoder import Encoder, Variables

POSITIONS = "params/positions"  # of a ViT, [1 + grid * grid, width]; resampled to other grids


def save_weights(path: pathlib.Path, encoder: Encoder, weights: dict[str, np.ndarray]) -> None:
    """Writes float32 arrays by name, after checking that they are the encoder's.

    Raises UserError if an array is missing, left over, not finite, or has another shape or type; or the file cannot be
    written.
    """
    from safetensors.numpy import save

    _check(path, encoder, weights)
    content = save({name: np.ascontiguousarray(array) for name, array in weights.items()})
    with writing(path), replaced(path) as file:
        file.write(content)


def load_weights(path: pathlib.Path, encoder: Encoder, side: int) -> Variables:
    """Reads an encoder's variables for images of side x side pixels. Raises a UserError if the file has others."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    _require(path)
    patch = getattr(encoder.module, "patch", 1)
    if side % patch:
        raise UserError(f"encoder.side={side} is not a multiple of {patch}, the side of this encoder's patches")
    try:
        weights = load_file(path)
    except (SafetensorError, OSError, KeyError) as error:  # KeyError: a type that NumPy lacks
        raise UserError(f"{path} is not a safetensors file of weights ({first_line(error)})") from error
    _check(path, encoder, weights)
    if POSITIONS in weights:
        weights[POSITIONS] = resampled(weights[POSITIONS], flat_shapes(encoder, side)[POSITIONS].shape[0])
    return unflatten_dict(weights, sep="/")


def _require(path: pathlib.Path) -> None:
    if not path.is_file():
        raise UserError(f"encoder.weights={path}: there is no such file; fedjax-ssl convert-weights makes it")


def flat_shapes(encoder: Encoder, side: int) -> dict[str, Any]:
    """Name -> shape and type of every array of an encoder for images of side x side pixels."""
    return flatten_dict(encoder.shapes(side), sep="/")


def _check(path: pathlib.Path, encoder: Encoder, weights: dict[str, np.ndarray]) -> None:
    """Raises a UserError unless these are an encoder's arrays; a ViT's grid of positions may be any square."""
    wanted = flat_shapes(encoder, encoder.side)
    for name in sorted(wanted.keys() | weights.keys()):
        if name not in wanted or name not in weights:
            found = "is missing" if name in wanted else "is left over"
        else:
            array, shape = weights[name], wanted[name].shape
            if name == POSITIONS and array.ndim == 2 and math.isqrt(max(1, len(array) - 1)) ** 2 == len(array) - 1:
                shape = len(array), shape[1]
            if array.shape != shape or array.dtype != np.float32:
                found = f"is {array.dtype} {array.shape}, not float32 {shape}"
            elif not np.isfinite(array).all():
                found = "has numbers that are not finite"
            else:
                continue
        raise UserError(f"{path} does not hold this encoder's weights: {name} {found}")


def resampled(positions: np.ndarray, tokens: int) -> np.ndarray:
    """Resamples position embeddings [1 + g * g, D] to [tokens, D], bicubically with antialiasing, as timm does."""
    if len(positions) == tokens:
        return positions
    old, new = math.isqrt(len(positions) - 1), math.isqrt(tokens - 1)
    grid = positions[1:].reshape(old, old, -1)
    grid = np.asarray(jax.image.resize(grid, (new, new, grid.shape[-1]), "cubic"))
    return np.concatenate([positions[:1], grid.reshape(new * new, -1)])


def checksum(path: pathlib.Path) -> str:
    """The SHA-256 of a file of weights."""
    _require(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
