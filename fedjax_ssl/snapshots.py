"""What a model makes of the test images after some rounds, kept while training for the report's pictures."""

import pathlib
from collections.abc import Callable

import jax
import numpy as np

from fedjax_ssl.batches import map_batches
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.files import replace_arrays
from fedjax_ssl.method import State
from fedjax_ssl.network import Network

NUM_EMBEDDINGS = 1000  # what a picture of the latent space can show


def make_snapshot(network: Network, batch_size: int) -> Callable[[State, FederatedData], dict[str, jax.Array]]:
    """The function that describes a state by its outputs on the test images.

    Returns:
        snapshot(state, data) -> `predictions`, int32 [T], and `labels`, int32 [T], of all test images; `embeddings`,
        float32 [n, D], and `embedding_labels`, int32 [n], of at most `NUM_EMBEDDINGS` of them, spread evenly over the
        set: the anchor head's outputs, or of a model without one its features.
    """

    def snapshot(state: State, data: FederatedData) -> dict[str, jax.Array]:
        def describe(images):
            outputs, features = network.predict_with_features(state.params, state.batch_stats, images)
            return outputs.logits.argmax(axis=-1), features if outputs.embeddings is None else outputs.embeddings

        predictions, embeddings = map_batches(describe, data.test_images, batch_size)
        count = len(data.test_labels)
        shown = np.linspace(0, count - 1, min(count, NUM_EMBEDDINGS)).astype(int)
        return {
            "predictions": predictions,
            "labels": data.test_labels,
            "embeddings": embeddings[shown],
            "embedding_labels": data.test_labels[shown],
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
