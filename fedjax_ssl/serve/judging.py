"""Judges predictions of labelled examples: further measures, and whether the examples were trained on."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.files import expanded
from fedjax_ssl.config import typed
from fedjax_ssl.data.kinds import IMAGE, KINDS, kind_of
from fedjax_ssl.data.sources import Dataset, load_dataset
from fedjax_ssl.engine.measures import OF_OUTPUTS, measure_outputs, words_of
from fedjax_ssl.records.workdir import CONFIG, read_config

MOST_BYTES = 2**31  # of training inputs that are compared


def dataset_of(workdir: str | os.PathLike[str]) -> Dataset:
    """The data set of a run, as it is now.

    Raises:
        UserError, OSError: it cannot be read.
    """
    folder = expanded(workdir)
    return load_dataset(typed(read_config(folder), folder / CONFIG).data)


def num_in_training(inputs: Any, facts: Mapping[str, Any], of_images: bool, workdir: str | os.PathLike[str]) -> int:
    """How many inputs equal a training example of the run in a folder; 0 if its data cannot be read.

    Args:
        inputs: as `Predictor` takes them.
        facts: of the run's data set.
        of_images: whether the inputs are images, for the model or for its encoder.
        workdir: the run's folder.
    """
    try:
        trained = dataset_of(workdir).x_train
    except (UserError, OSError):
        return 0
    if of_images:
        given = KINDS[IMAGE].given(inputs, {"image_shape": trained.shape[1:]})
    else:
        given = kind_of(facts).given(inputs, facts)
        trained = trained[:, 0] if "weak_views" in facts and trained.ndim == 3 else trained
    if given.shape[1:] != trained.shape[1:] or trained.nbytes > MOST_BYTES:
        return 0
    known = {hash(example.tobytes()) for example in trained}
    return sum(hash(example.tobytes()) in known for example in given.astype(trained.dtype))


def in_words(labels: np.ndarray, predictions: np.ndarray, probabilities: np.ndarray) -> str:
    """How good predictions are besides their accuracy.

    Args:
        labels: int [B], the true classes, -1 if unknown.
        predictions: int [B].
        probabilities: float [B, C].
    """
    known, number = labels >= 0, probabilities.shape[1]
    labels, probabilities = labels[known], probabilities[known]
    ranks = np.sum(probabilities > np.take_along_axis(probabilities, labels[:, None], axis=1), axis=1)
    found = measure_outputs(labels, predictions[known], number, probabilities.max(axis=1), ranks)
    if number <= 5:
        del found["top5_accuracy"]
    words = words_of(OF_OUTPUTS)
    return ", ".join(f"{words[name]} {100 * value:.2f} %" for name, value in found.items() if np.isfinite(value))
