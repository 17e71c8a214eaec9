"""Validation images: which rows they are, that nobody else holds them, and that no method sees their labels."""

import numpy as np
import pytest

from fedjax_ssl import UserError
from fedjax_ssl.config import base_config
from fedjax_ssl.data import PARTITIONS, Dataset, Partition, federate, load_partition, make_partition, save_partition
from fedjax_ssl.data import class_counts as who_holds_what
from fedjax_ssl.run.validation import validate
from tests.helpers.partitions import LABELS, assert_no_row_twice, data_config, labels_of

SETTINGS = ("server", "clients", "some_clients")


def draw(seed=3, **fields):
    return make_partition(LABELS, 10, data_config(**{"validation": 500, **fields}), 40, seed)


@pytest.mark.parametrize("where", SETTINGS)
@pytest.mark.parametrize("scheme", PARTITIONS)
def test_they_are_balanced_and_nobody_else_s(scheme, where):
    partition = draw(partition=scheme, labels=where, alpha=0.5)
    assert_no_row_twice(partition, len(LABELS))
    assert np.bincount(LABELS[partition.validation_index]).tolist() == [50] * 10
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


def test_they_depend_on_the_seed_and_their_number_alone():
    drawn = [draw(partition=scheme, labels=where, alpha=1.0) for scheme in PARTITIONS for where in SETTINGS]
    assert all(np.array_equal(one.validation_index, drawn[0].validation_index) for one in drawn)
    assert not np.array_equal(draw(seed=4).validation_index, drawn[0].validation_index)


BAD = {
    "not divisible": ({"validation": 505}, ["data.validation=505 cannot be the same", "500 or 510 would do"]),
    "fewer than classes": ({"validation": 5}, ["data.validation=5", "classes; 10 would do"]),
    "more than a class has": ({"validation": 50_010}, ["5001 examples of each class", "5000", "lower data.validation"]),
    "no anchors left": ({"validation": 49_900}, ["data.server_labels=250", "100 training examples left"]),
    "no clients left": (
        {"validation": 49_700, "server_labels": 290},
        ["num_clients=40", "10 examples that 49700 validation images and 290 server images leave of 50000"],
    ),
    "no clients left without anchors": (
        {"validation": 49_990, "labels": "clients"}, ["10 examples that 49990 validation images leave of 50000"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_impossible_numbers_are_one_line(case):
    fields, parts = BAD[case]
    with pytest.raises(UserError) as error:
        draw(**fields)
    assert "\n" not in str(error.value) and all(part in str(error.value) for part in parts), error.value


def test_the_configuration_is_checked_before_data_are_read():
    config = base_config()
    config.data.validation = -10
    with pytest.raises(UserError, match=r"data.validation must be at least 0, not -10"):
        validate(config)


def test_a_file_keeps_them_and_must_agree(tmp_path):
    path, labels = tmp_path / "partition.npz", labels_of(10, 400)

    def drawn(validation, **fields):
        config = data_config(partition="iid", server_labels=10, validation=validation, **fields)
        return make_partition(labels, 10, config, 5, 3)

    save_partition(path, drawn(20))
    for found in load_partition(path, 400, 5), drawn(20, partition_file=str(path)):
        np.testing.assert_array_equal(found.validation_index, drawn(20).validation_index)
        assert found.validation_index.dtype == np.int32
    for number in (0, 10):
        with pytest.raises(UserError, match=f"has 20 validation images, but data.validation={number}$"):
            drawn(number, partition_file=str(path))
    with np.load(path) as arrays:
        old = {name: arrays[name] for name in arrays if name != "validation_index"}
        shared = {**arrays, "validation_index": [*arrays["validation_index"][1:], arrays["client_index"][0]]}
    np.savez(path, **shared)
    with pytest.raises(UserError, match=f"names row {shared['validation_index'][-1]} more than once; a row has one"):
        drawn(20, partition_file=str(path))
    np.savez(path, **old)  # as an earlier version wrote it
    assert drawn(0, partition_file=str(path)).validation_index.shape == (0,)
    with pytest.raises(UserError, match=r"has 0 validation images, but data.validation=20"):
        drawn(20, partition_file=str(path))


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
