"""Judges predictions of labelled examples: further measures, and whether the examples were trained on."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjax_ssl.base.files import expanded
from fedjax_ssl.data.content import row_sums
from fedjax_ssl.data.kinds import IMAGE, KINDS, kind_of
from fedjax_ssl.data.npz import read_arrays
from fedjax_ssl.engine.measures import OF_OUTPUTS, measure_outputs, words_of
from fedjax_ssl.records.workdir import PARTITION


def num_in_training(inputs: Any, facts: Mapping[str, Any], of_images: bool, workdir: str | os.PathLike[str]) -> int:
    """How many inputs equal a training example of the run in a folder, by their checksums; 0 if it has none.

    `of_images`: whether the inputs are images, for the model or for its encoder.
    """
    file, kind = expanded(workdir) / PARTITION, kind_of(facts)
    known = read_arrays(str(file), (), optional=("row_sums",)) if file.exists() else {}
    if of_images:
        kind, facts = KINDS[IMAGE], {"image_shape": facts.get("encoded_images", facts.get("image_shape"))}
    return (
        int(np.isin(row_sums(kind.given(inputs, facts).astype(kind.stored)), known["row_sums"]).sum()) if known else 0
    )


def in_words(
    labels: np.ndarray, predictions: np.ndarray, probabilities: np.ndarray, class_names: tuple[str, ...]
) -> str:
    """How good predictions are besides their accuracy; labels int [B] are -1 if unknown, probabilities float [B, C]."""
    known, number = labels >= 0, probabilities.shape[1]
    labels, probabilities = labels[known], probabilities[known]
    ranks = np.sum(probabilities > np.take_along_axis(probabilities, labels[:, None], axis=1), axis=1)
    found = measure_outputs(labels, predictions[known], number, probabilities.max(axis=1), ranks)
    if number <= 5:
        del found["top5_accuracy"]
    words = dict(words_of(OF_OUTPUTS))
    if number == 2:
        words |= {name: f"{name} (positive: {class_names[1]})" for name in ("sensitivity", "specificity")}
    return ", ".join(f"{words[name]} {100 * value:.2f} %" for name, value in found.items() if np.isfinite(value))
