"""A partition's file: what is written is read, and what does not fit is refused in one line."""

import numpy as np

from fedjax_ssl.data import load_partition, make_partition, save_partition
from tests.helpers.partitions import data_config, labels_of, sizes_of


def test_partition_file_round_trip_and_use(tmp_path):
    config = data_config(partition="dirichlet_classes", alpha=0.01, server_labels=10, validation=20)
    labels = labels_of(10, 250)
    partition = make_partition(labels, 10, config, 200, 3)
    assert sizes_of(partition).min() == 0  # Empty clients survive.
    path = tmp_path / "partition.npz"
    save_partition(path, partition)
    assert [file.name for file in tmp_path.iterdir()] == ["partition.npz"]
    config.partition_file = str(path)
    for loaded in load_partition(path, 250, 200), make_partition(labels, 10, config, 200, seed=99):
        np.testing.assert_array_equal(loaded.server_index, partition.server_index)
        assert loaded.server_index.dtype == np.int32
        assert all(map(np.array_equal, loaded.client_rows, partition.client_rows))
        assert len(loaded.client_rows) == 200 and loaded.client_rows[0].dtype == np.int32
        np.testing.assert_array_equal(loaded.validation_index, partition.validation_index)
        assert loaded.validation_index.dtype == np.int32 and len(loaded.validation_index) == 20
        assert loaded.labelled_rows.shape == (0,) and loaded.labelled_rows.dtype == np.int32
    with np.load(path) as arrays:
        old = {name: arrays[name] for name in ("server_index", "client_index", "client_size")}
    np.savez(path, **old)  # a file may leave the others out
    config.validation = 0
    np.testing.assert_array_equal(make_partition(labels, 10, config, 200, 0).server_index, partition.server_index)
