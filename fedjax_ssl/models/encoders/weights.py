"""Files of an encoder's weights: safetensors, float32, with names such as 'params/block0/qkv/kernel'."""

import hashlib
import math
import pathlib
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjax_ssl.base.errors import UserError, first_line
from fedjax_ssl.base.files import replaced
from fedjax_ssl.models.encoders.encoder import Encoder, Variables

POSITIONS = "params/positions"  # of a ViT, [1 + grid * grid, width]; resampled to other grids


def save_weights(path: pathlib.Path, encoder: Encoder, weights: dict[str, np.ndarray]) -> None:
    """Writes float32 arrays by name, after checking that they are the encoder's.

    Raises:
        UserError: an array is missing, left over, not finite, or has another shape; or the file cannot be written.
    """
    from safetensors.numpy import save

    check(str(path), encoder, {name: array.shape for name, array in weights.items()})
    _check_finite(path, weights)
    content = save({name: np.ascontiguousarray(array, np.float32) for name, array in weights.items()})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as file:
            file.write(content)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def load_weights(path: pathlib.Path, encoder: Encoder, side: int) -> Variables:
    """Reads an encoder's variables for images of side x side pixels.

    Raises:
        UserError: the file cannot be read; or an array is missing, left over, not finite, or has another shape or type.
    """
    from safetensors import SafetensorError, safe_open

    _require(path)
    patch = getattr(encoder.module, "patch", 1)
    if side % patch:
        raise UserError(f"encoder.side={side} is not a multiple of {patch}, the side of this encoder's patches")
    try:
        with safe_open(path, "numpy") as file:
            slices = {name: file.get_slice(name) for name in sorted(file.keys())}
            # Checked before anything is read: an untrusted file may announce arrays of any size.
            check(str(path), encoder, {name: tuple(part.get_shape()) for name, part in slices.items()})
            types = {name: part.get_dtype() for name, part in slices.items() if part.get_dtype() != "F32"}
            if types:
                raise UserError(f"{path}: {next(iter(types))} is {next(iter(types.values()))}; weights are F32")
            weights = {name: file.get_tensor(name) for name in slices}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a safetensors file of weights ({first_line(error)})") from error
    _check_finite(path, weights)
    if POSITIONS in weights:
        weights[POSITIONS] = resampled(weights[POSITIONS], flat_shapes(encoder, side)[POSITIONS].shape[0])
    return unflatten_dict({tuple(name.split("/")): array for name, array in weights.items()})


def _require(path: pathlib.Path) -> None:
    if not path.is_file():
        raise UserError(f"encoder.weights={path}: there is no such file; fedjax-ssl convert-weights makes it")


def _check_finite(path: pathlib.Path, weights: dict[str, np.ndarray]) -> None:
    bad = next((name for name, array in weights.items() if not np.isfinite(array).all()), None)
    if bad:
        raise UserError(f"{path}: {bad} has numbers that are not finite")


def flat_shapes(encoder: Encoder, side: int) -> dict[str, Any]:
    """Name -> shape and type of every array of an encoder for images of side x side pixels."""
    return {"/".join(path): leaf for path, leaf in flatten_dict(encoder.shapes(side)).items()}


def check(where: str, encoder: Encoder, found: dict[str, tuple[int, ...]]) -> None:
    """Raises a UserError unless `found` has an encoder's arrays and shapes; a ViT's grid may be any square."""
    wanted = {name: leaf.shape for name, leaf in flat_shapes(encoder, encoder.side).items()}
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or extra:
        words = [f"{len(names)} arrays are {kind}, such as {names[0]}" for kind, names in (
            ("missing", missing), ("left over", extra)) if names]  # fmt: skip
        raise UserError(f"{where} does not hold this encoder's weights: {'; '.join(words)}")
    for name, shape in found.items():
        if name == POSITIONS and len(shape) == 2 and shape[1] == wanted[name][1] and is_grid(shape[0]):
            continue
        if shape != wanted[name]:
            raise UserError(f"{where} does not hold this encoder's weights: {name} is {shape}, not {wanted[name]}")


def is_grid(tokens: int) -> bool:
    """Whether `tokens` is the size of a class token and a square grid of at most 100 x 100 patches."""
    return 2 <= tokens <= 10_001 and math.isqrt(tokens - 1) ** 2 == tokens - 1


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
