"""What a model makes of the test images after some rounds, kept while training for the report's pictures."""

import pathlib
from collections.abc import Callable

import jax
import numpy as np

from fedjax_ssl.batches import map_batches
from fedjax_ssl.files import replace_arrays
from fedjax_ssl.network import BatchStats, Network, Params

NUM_EMBEDDINGS = 1000  # what a picture of the latent space can show


def make_snapshot(network: Network, batch_size: int) -> Callable[..., dict[str, jax.Array]]:
    """The function that describes a model by its outputs on the test images.

    Returns:
        snapshot(params, batch_stats, images [T, H, W, C], labels [T]) -> `predictions` and `labels`, int32 [T];
        `embeddings`, float32 [n, D], and `embedding_labels`, int32 [n], of at most `NUM_EMBEDDINGS` images, spread
        evenly over the set: the anchor head's outputs, or of a model without one its features.
    """

    def snapshot(params: Params, batch_stats: BatchStats, images: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        def describe(some):
            outputs, features = network.predict_with_features(params, batch_stats, some)
            return outputs.logits.argmax(axis=-1), features if outputs.embeddings is None else outputs.embeddings

        predictions, embeddings = map_batches(describe, images, batch_size)
        shown = np.linspace(0, len(labels) - 1, min(len(labels), NUM_EMBEDDINGS)).astype(int)
        return {
            "predictions": predictions,
            "labels": labels,
            "embeddings": embeddings[shown],
            "embedding_labels": labels[shown],
        }

    return snapshot


def save_snapshot(folder: pathlib.Path, round_number: int, snapshot: dict[str, np.ndarray]) -> None:
    """Writes a snapshot as FOLDER/round_NNNNNN.npz."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_arrays(folder / f"round_{round_number:06d}.npz", **snapshot)


def load_snapshots(folder: pathlib.Path) -> dict[int, dict[str, np.ndarray]]:
    """All snapshots of a folder, by round, the earliest first."""
    found = {}
    for path in sorted(folder.glob("round_*.npz")):
        with np.load(path) as arrays:
            found[int(path.stem.removeprefix("round_"))] = dict(arrays)
    return found
