"""For tests of partitions: labels of CIFAR's size, the configuration, and counts by hand."""

import numpy as np

from fedjax_ssl.base.fields.data import data_fields


def data_config(**fields):
    """The section `data` with its defaults, but 250 labels at the server."""
    config = data_fields().config()
    config.update({"server_labels": 250, **fields})
    return config


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
