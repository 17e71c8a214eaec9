"""Data are known by their content: checksums of inputs and labels, which no path or name changes."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

# The entries of `checksums` -> what is said if two data sets differ in one.
WORDS = {
    "train_inputs": "other training inputs, or in another order",
    "train_labels": "other training labels, or in another order",
    "test_inputs": "other test inputs, or in another order",
    "test_labels": "other test labels, or in another order",
    "owners": "other clients of the training rows",
    "domains": "other domains of the rows",
}


def row_sums(inputs: np.ndarray) -> np.ndarray:
    """A checksum of each example's inputs: uint64 [N], the first 8 bytes of its SHA-256.

    A pass over all bytes: about 1.4 s per GB of 32 x 32 images, and at least 1.5 s per million examples.
    """
    return np.frombuffer(b"".join(hashlib.sha256(row.tobytes()).digest()[:8] for row in inputs), "<u8")


def checksum(array: np.ndarray) -> str:
    """SHA-256 of an array of integers, of any size."""
    return hashlib.sha256(array.astype("<i8").tobytes()).hexdigest()


def checksums(dataset: Any) -> dict[str, str]:
    """The checksums of a `Dataset`, by the names in `WORDS`; of the inputs as they were read, before an encoder."""
    number, domains = len(dataset.y_train), dataset.domains
    return {
        "train_inputs": checksum(dataset.row_sums[:number]),
        "train_labels": checksum(dataset.y_train),
        "test_inputs": checksum(dataset.row_sums[number:]),
        "test_labels": checksum(dataset.y_test),
        **({} if dataset.owners is None else {"owners": checksum(dataset.owners)}),
        **({"domains": checksum(np.unique(np.concatenate(domains), return_inverse=True)[1])} if domains else {}),
    }


def arrays_of_data(dataset: Any) -> dict[str, np.ndarray]:
    """What a partition file says of the training set that it was drawn for; {} if it is not known.

    These are `row_sums`, uint64 [N], see above, and `labels_sum`, uint64 [1], of all its labels.
    """
    if dataset.row_sums is None:
        return {}
    labels = np.array([int(checksum(dataset.y_train)[:16], 16)], np.uint64)
    return {"row_sums": dataset.row_sums[: len(dataset.y_train)], "labels_sum": labels}


def what_differs(then: Mapping[str, str], now: Mapping[str, str], names: tuple[str, ...] = tuple(WORDS)) -> str:
    """The first difference of two results of `checksums` among these names, in words; '' if there is none."""
    return next((WORDS[name] for name in names if then.get(name) != now.get(name)), "")
