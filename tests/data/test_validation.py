"""Validation images: which rows they are, that nobody else holds them, and that no method sees their labels."""

import itertools

import numpy as np
import pytest

from fedjax_ssl.data import PARTITIONS, Dataset, Partition, federate, make_partition
from fedjax_ssl.data import class_counts as who_holds_what
from tests.helpers.partitions import LABELS, assert_no_row_twice, data_config

SETTINGS = ("server", "clients", "some_clients")


def draw(seed=3, **fields):
    return make_partition(LABELS, 10, data_config(**{"validation": 500, **fields}), 40, seed)


@pytest.mark.parametrize(("scheme", "where"), list(zip(PARTITIONS, itertools.cycle(SETTINGS))))
def test_they_are_balanced_and_nobody_else_s(scheme, where):
    partition = draw(partition=scheme, labels=where, alpha=0.5)
    assert_no_row_twice(partition, len(LABELS))
    assert np.bincount(LABELS[partition.validation_index]).tolist() == [50] * 10
    np.testing.assert_array_equal(partition.validation_index, draw().validation_index)
    assert not np.isin(partition.labelled_rows, partition.validation_index).any()
    counts = who_holds_what(LABELS, partition, 10)
    assert counts["validation"].tolist() == [50] * 10
    if scheme in ("dirichlet_classes", "shards"):  # which divide all that they are given
        held = counts["clients"].sum(axis=0) + counts["server"] + counts["validation"]
        assert held.tolist() == counts["train"].tolist()


@pytest.mark.parametrize("where", SETTINGS)
def test_the_draw_is_a_stream_of_its_own_and_comes_first(where):
    """All by NumPy: the validation images, then the anchors of the rest, then the clients' shares of what is left."""
    partition = draw(labels=where, partition="shards", server_labels=20)
    rng = np.random.default_rng([3, 3])
    validation = rng.permutation(np.concatenate([rng.permutation(np.flatnonzero(c == LABELS))[:50] for c in range(10)]))
    np.testing.assert_array_equal(partition.validation_index, validation)
    assert partition.validation_index.dtype == partition.server_index.dtype == np.int32
    rest = np.setdiff1d(np.arange(len(LABELS)), validation)
    anchors = np.zeros(0, int)
    if where == "server":
        rng = np.random.default_rng([3, 0])
        anchors = [rng.permutation(rest[LABELS[rest] == c])[:2] for c in range(10)]
        anchors = rng.permutation(np.concatenate(anchors))
    np.testing.assert_array_equal(partition.server_index, anchors)
    rest, rng = np.setdiff1d(rest, anchors), np.random.default_rng([3, 1])
    shares = PARTITIONS["shards"](LABELS[rest], 40, data_config(), rng)
    for rows, share in zip(partition.client_rows, shares, strict=True):
        np.testing.assert_array_equal(rows, rest[rng.permutation(share)])


@pytest.mark.parametrize("bound", [{}, {"reveal_labels": True}, {"centralised": True}])
def test_no_method_sees_their_labels(bound):
    truth = (np.arange(12) % 3).astype(np.int32)
    images = np.zeros((12, 4, 4, 1), np.uint8)
    dataset = Dataset("small", images, truth, images[:3], truth[:3], 3, (0.5,), (0.5,), False)
    rows = [np.array(rows, np.int32) for rows in ([7, 2, 9], [4], [0, 11])]
    held_out = np.array([10, 6, 8], np.int32)
    partition = Partition(np.array([5, 1, 3], np.int32), rows, validation_index=held_out)
    data, hidden = federate(dataset, partition, 0, **bound)
    np.testing.assert_array_equal(data.validation_index, held_out)
    np.testing.assert_array_equal(data.visible_labels[held_out], -1)
    assert np.count_nonzero(np.asarray(data.visible_labels) >= 0) == (9 if bound else 3)
    assert not np.isin(data.server_index, held_out).any()
    np.testing.assert_array_equal(hidden, truth)  # for the scoring
    permuted = truth.copy()
    permuted[held_out] = (permuted[held_out] + 1) % 3
    other, _ = federate(dataset._replace(y_train=permuted), partition, 0, **bound)
    assert (permuted != truth).any() and all(map(np.array_equal, data, other))
