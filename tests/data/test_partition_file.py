"""A partition's file: what is written is read, and what does not fit is refused in one line."""

import numpy as np
import pytest

from fedjax_ssl.data import load_partition, make_partition, save_partition
from tests.helpers.partitions import LABELS, data_config, expect_line, labels_of, sizes_of


def test_partition_file_round_trip_and_use(tmp_path):
    config = data_config(partition="dirichlet_classes", alpha=0.01, server_labels=10)
    labels = labels_of(10, 400)
    partition = make_partition(labels, 10, config, 200, 3)
    assert sizes_of(partition).min() == 0  # Empty clients survive.
    path = tmp_path / "partition.npz"
    save_partition(path, partition)
    assert [file.name for file in tmp_path.iterdir()] == ["partition.npz"]
    config.partition_file = str(path)
    for loaded in load_partition(path, 400, 200), make_partition(labels, 10, config, 200, seed=99):
        np.testing.assert_array_equal(loaded.server_index, partition.server_index)
        assert loaded.server_index.dtype == np.int32
        assert all(map(np.array_equal, loaded.client_rows, partition.client_rows))
        assert len(loaded.client_rows) == 200 and loaded.client_rows[0].dtype == np.int32
        assert loaded.labelled_rows.shape == (0,) and loaded.labelled_rows.dtype == np.int32
    with np.load(path) as arrays:
        old = {name: arrays[name] for name in ("server_index", "client_index", "client_size")}
    np.savez(path, **old)  # as an earlier version wrote it
    np.testing.assert_array_equal(make_partition(labels, 10, config, 200, 0).server_index, partition.server_index)


GOOD_FILE = {"server_index": [0, 1], "client_index": [2, 3, 4, 5], "client_size": [3, 1]}
BAD_FILES = {
    "missing array": ({"client_size": None}, ["no client_size"]),
    "floats": ({"client_index": [2.0, 3, 4, 5]}, ["client_index is float64"]),
    "two axes": ({"client_index": [[2, 3], [4, 5]]}, ["client_index", "(2, 2)"]),
    "number of clients": ({"client_size": [2, 1, 1]}, ["3 clients", "num_clients=2"]),
    "number of anchors": ({"server_index": [0]}, ["1 images of the server", "server_labels=2"]),
    "sizes do not add up": ({"client_size": [3, 2]}, ["must add up to the 4 rows"]),
    "sizes that overflow": ({"client_size": [2**63 - 1, 2**63 - 1, 6]}, ["must add up to the 4 rows"], 3),
    "negative size": ({"client_size": [5, -1]}, ["client_size"]),
    "row outside": ({"client_index": [2, 3, 4, 6]}, ["row 6", "6 examples"]),
    "negative row": ({"server_index": [0, -1]}, ["row -1"]),
    "anchor at a client": ({"client_index": [2, 3, 4, 1]}, ["row 1 more than once"]),
    "row at two clients": ({"client_index": [2, 3, 4, 3]}, ["row 3 more than once"]),
    "labelled floats": ({"labelled_index": [2.0]}, ["labelled_index is float64"]),
    "labelled anchor": ({"labelled_index": [2, 1]}, ["row 1 of labelled_index belongs to no client"]),
    "labelled twice": ({"labelled_index": [2, 2]}, ["row 2 of labelled_index", "more than once"]),
    "too many at a client": ({"client_size": [4, 0]}, ["client 0 4 examples", "data.examples_per_client=3"]),
    "labels at clients": ({"labelled_index": [2]}, ["1 labelled examples at clients", "not fit data.labels='server'"]),
}
LABELLED_FILE = {"server_index": [], "client_index": [2, 3, 4, 5], "client_size": [3, 1], "labelled_index": [3, 2, 4]}
BAD_LABELLED_FILES = {
    "none at clients": (
        "clients",
        {"labelled_index": None},
        ["0 labelled examples at clients", "data.labels='clients'"],
    ),
    "anchors": ("clients", {"server_index": [0]}, ["1 images of the server", "data.labels='clients'"]),
    "in part": ("some_clients", {"labelled_index": [3, 2]}, ["client 0 has some labels", "data.labels='some_clients'"]),
    "two clients": ("some_clients", {"labelled_index": [2, 3, 4, 5]}, ["2 clients have labels", "labelled_clients=1"]),
}


@pytest.mark.parametrize("case", BAD_LABELLED_FILES)
def test_partition_file_whose_labels_are_elsewhere(tmp_path, case):
    where, changes, parts = BAD_LABELLED_FILES[case]
    path = tmp_path / "partition.npz"
    config = data_config(labels=where, partition_file=str(path))
    labels = np.arange(6) % 2
    np.savez(path, **LABELLED_FILE)
    assert make_partition(labels, 2, config, 2, 0).labelled_rows.tolist() == [3, 2, 4]  # Without the change it fits.
    np.savez(path, **{key: value for key, value in (LABELLED_FILE | changes).items() if value is not None})
    expect_line([*parts, str(path)], labels, 2, config, 2)


@pytest.mark.parametrize("case", BAD_FILES)
def test_partition_file_that_does_not_fit(tmp_path, case):
    changes, parts, *num_clients = BAD_FILES[case]
    path = tmp_path / "partition.npz"
    config = data_config(server_labels=2, examples_per_client=3, partition_file=str(path))
    labels = np.arange(6) % 2
    np.savez(path, **GOOD_FILE)
    make_partition(labels, 2, config, 2, 0)  # Without the change it fits.
    np.savez(path, **{key: value for key, value in (GOOD_FILE | changes).items() if value is not None})
    expect_line([*parts, str(path)], labels, 2, config, *(num_clients or [2]))


def test_shares_that_are_texts(tmp_path):
    path = tmp_path / "partition.npz"
    rows = {"server_index": [], "client_index": [0, 1], "client_size": [1, 1], "label_share": ["0.5", "1"]}
    np.savez(path, **rows)
    config = data_config(labels="profile", server_labels=0, partition_file=str(path))
    expect_line(["label_share must be 2 numbers from 0 to 1"], np.arange(2), 2, config, 2)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float16])
def test_shares_of_any_type(tmp_path, dtype):
    path = tmp_path / "partition.npz"
    rows = {"server_index": [], "client_index": np.arange(600), "client_size": [300, 300]}
    np.savez(path, **rows, label_share=np.array([0, 1], dtype))
    config = data_config(labels="profile", server_labels=0, partition_file=str(path))
    labelled = make_partition(np.arange(600) % 2, 2, config, 2, 0).labelled_rows
    np.testing.assert_array_equal(np.sort(labelled), np.arange(300, 600))


@pytest.mark.parametrize("shares", [{}, {"label_share": [0.0, 0.0]}])
def test_a_profile_in_which_nobody_has_a_label(tmp_path, shares):
    path = tmp_path / "partition.npz"
    np.savez(path, server_index=[], client_index=[0, 1], client_size=[1, 1], **shares)
    config = data_config(labels="profile", server_labels=0, partition_file=str(path))
    expect_line([str(path), "0 images of the server and 0 labelled examples"], np.arange(2), 2, config, 2)


def test_partition_file_that_is_missing(tmp_path):
    path = tmp_path / "absent.npz"
    expect_line([str(path), "does not exist"], LABELS, 10, data_config(partition_file=str(path)), 100)
