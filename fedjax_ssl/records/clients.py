"""Accuracy per client: of one global model on each client's mix of classes, and on its own test images.

The test set is not divided among clients. A client's accuracy is the mean of the test accuracies of the classes,
weighted by how many images of each class the client holds: it estimates accuracy on new images of the client's mix.

Source of the figures: Li et al., "Fair Resource Allocation in Federated Learning", ICLR 2020: mean, worst tenth and
spread over clients.
"""

import math
import pathlib
from collections.abc import Mapping

import numpy as np

from fedjax_ssl.base.files import replace_arrays
from fedjax_ssl.records.fitting import read_fitting

OVER_CLIENTS = {"mean": "mean over clients", "worst_tenth": "worst tenth of clients", "spread": "spread over clients"}

CLIENT_TESTS = "client_tests.npz"  # in a run's folder, see `save_client_tests`
GLOBAL, TUNED, PERSONAL = "global", "tuned", "personal"  # models that are tested on each client's own test images
TESTED = {GLOBAL: "global model", TUNED: "fine-tuned", PERSONAL: "own parts"}  # their names in words
FIGURES = {  # name in summary.json -> in words
    **{f"client_accuracy_{figure}": words for figure, words in OVER_CLIENTS.items()},
    **{
        f"client_test_{model}_{figure}": f"{of}, own tests: {words}"
        for model, of in TESTED.items()
        for figure, words in OVER_CLIENTS.items()
    },
}


def save_client_tests(
    folder: pathlib.Path, round_number: int, images: np.ndarray, accuracies: Mapping[str, np.ndarray]
) -> None:
    """Writes RUN/client_tests.npz, of a test after this round; it replaces that of an earlier round.

    A client has `images`, int [K], of its own. `accuracies`: model, of `TESTED` -> its accuracy on these, float [K],
    NaN without images.
    """
    replace_arrays(folder / CLIENT_TESTS, round=np.array(round_number), images=images, **accuracies)


def load_client_tests(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads RUN/client_tests.npz; {} without it. Raises a UserError if it cannot be read, or has other arrays."""
    path = folder / CLIENT_TESTS
    if not path.exists():
        return {}
    return read_fitting(path, {"round": "iu"}, dict.fromkeys(TESTED, "f K"))


def accuracy_of_clients(labels: np.ndarray, predictions: np.ndarray, held: np.ndarray) -> np.ndarray:
    """A model's accuracy on each client's mix of classes, from 0 to 1: float64 [K].

    Labels and the model's predictions are of the test set, int [T]; each client holds `held` images of each class, int
    [K, C]. Classes that are missing in the test set are left out of the mixes; NaN for a client without other classes.
    """
    num_classes = held.shape[1]
    total = np.bincount(labels, minlength=num_classes)
    right = np.bincount(labels[labels == predictions], minlength=num_classes)
    weights = np.where(total > 0, held, 0).astype(float)
    size = weights.sum(axis=1)
    return np.where(size > 0, weights @ (right / np.maximum(total, 1)) / np.maximum(size, 1), np.nan)


def over_clients(accuracies: np.ndarray) -> dict[str, float | None]:
    """The figures of `OVER_CLIENTS` over the clients that have images; None if none has.

    They are `mean`, in which each client counts the same; `worst_tenth`, the mean over the worst tenth of the clients,
    rounded up; and `spread`, the standard deviation over all clients (divided by K).
    """
    present = np.sort(accuracies[np.isfinite(accuracies)])
    if not len(present):
        return dict.fromkeys(OVER_CLIENTS)
    worst = present[: math.ceil(len(present) / 10)]
    return dict(zip(OVER_CLIENTS, map(float, (present.mean(), worst.mean(), present.std()))))


def test_figures(accuracies: Mapping[str, np.ndarray]) -> dict[str, float | None]:
    """The figures over clients of the models of `TESTED`, by their names in summary.json and metrics.jsonl."""
    return {
        f"client_test_{model}_{figure}": value
        for model, of_clients in accuracies.items()
        for figure, value in over_clients(of_clients).items()
    }


def client_sizes(counts: Mapping[str, np.ndarray]) -> np.ndarray:
    """The number of each client's examples, int [K], from `fedjax_ssl.data.class_counts`."""
    return counts["clients"].sum(axis=1) + counts.get("unlabelled", 0) + counts.get("unknown", 0)
