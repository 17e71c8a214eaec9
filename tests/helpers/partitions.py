"""For tests of partitions: labels of CIFAR's size, the configuration, and counts by hand."""

import numpy as np
import pytest
from ml_collections import config_dict

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data import make_partition


def data_config(**fields):
    config = {
        "partition": "lda",
        "alpha": 0.1,
        "classes_per_client": 2,
        "main_share": 0.4,
        "server_labels": 250,
        "server_draw": "balanced",
        "validation": 0,
        "examples_per_client": 0,
        "partition_file": "",
        "labels": "server",
        "labelled_share": 0.1,
        "labels_per_class": 0,
        "num_labelled": 0,
        "labelled_clients": 1,
        "labelled_rule": "random",
        "label_profile": ("beta(0.3,0.3)",),
        "imbalance": 1.0,
        "client_test_share": 0.0,
    }
    return config_dict.ConfigDict(config | fields)


def labels_of(num_classes=10, num_examples=50_000):
    return np.random.default_rng(5).permutation(np.arange(num_examples) % num_classes)


LABELS = labels_of()


def sizes_of(partition):
    return np.array([len(rows) for rows in partition.client_rows])


def class_counts(partition, labels, num_classes):
    """[K, C], the number of examples of each class at each client."""
    return np.stack([np.bincount(labels[rows], minlength=num_classes) for rows in partition.client_rows])


def assert_no_row_twice(partition, num_examples):
    rows = np.concatenate([partition.server_index, partition.validation_index, *partition.client_rows])
    assert rows.dtype == np.int32 and rows.min() >= 0 and rows.max() < num_examples
    assert len(np.unique(rows)) == len(rows)


def expect_line(parts, labels, num_classes, config, num_clients):
    """Checks that the partition is refused in one line with these parts."""
    with pytest.raises(UserError) as error:
        make_partition(labels, num_classes, config, num_clients, 0)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
