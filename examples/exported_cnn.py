"""The network of `model.name=cnn` in NumPy, from an exported safetensors file: docs/how_to/export.md."""

from collections.abc import Mapping, Sequence

import numpy as np


def scores(
    tensors: Mapping[str, np.ndarray], mean: Sequence[float], std: Sequence[float], images: np.ndarray
) -> np.ndarray:
    """The logits [B, classes] of uint8 images [B, H, W, C].

    Args:
        tensors: the file's, by name. Kernels of convolutions are [3, 3, in, out], those of dense layers [in, out].
        mean, std: of each channel, from the file's metadata.
        images: pixels from 0 to 255.
    """

    def normalised_relu(x: np.ndarray, n: int) -> np.ndarray:
        scale, bias = (tensors[f"params.backbone.norm{n}.{name}"] for name in ("scale", "bias"))
        average, var = (tensors[f"batch_stats.backbone.norm{n}.{name}"] for name in ("mean", "var"))
        return np.maximum((x - average) / np.sqrt(var + 1e-5) * scale + bias, 0)

    x = (images / 255 - mean) / std
    for n in (0, 1):  # convolution padded by 1, normalisation, the largest of 2x2
        padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))
        kernel = tensors[f"params.backbone.conv{n}.kernel"]
        x = normalised_relu(np.einsum("bhwcij,ijco->bhwo", windows, kernel), n)
        b, h, w, c = x.shape
        x = x[:, : h // 2 * 2, : w // 2 * 2].reshape(b, h // 2, 2, w // 2, 2, c).max(axis=(2, 4))
    x = normalised_relu(x.reshape(len(x), -1) @ tensors["params.backbone.hidden.kernel"], 2)
    return x @ tensors["params.classifier.kernel"] + tensors["params.classifier.bias"]
