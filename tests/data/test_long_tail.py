"""Long tails against Python's exact fractions, and the partition of RSCFed's family."""

import fractions

import numpy as np
import pytest

from fedjax_ssl.data import make_partition
from fedjax_ssl.data.long_tail import tail_counts
from tests.helpers.partitions import LABELS, assert_no_row_twice, class_counts, data_config, labels_of, sizes_of

CIFAR100 = labels_of(100)


def by_hand(largest, imbalance, num_classes):
    """The largest whole n with n^(C - 1) IF^c <= n_max^(C - 1), in Python's integers."""
    counts = []
    for c in range(num_classes):
        n = largest
        while n ** (num_classes - 1) * imbalance**c > largest ** (num_classes - 1):
            n -= 1
        counts.append(n)
    return counts


@pytest.mark.parametrize(
    ("largest", "imbalance", "num_classes"),
    [(5000, 100, 10), (500, 100, 100), (1500, 150, 10), (343, 49, 3), (7, 7, 2)],
)
def test_counts_of_a_tail_are_exact(largest, imbalance, num_classes):
    counts = tail_counts(largest, imbalance, num_classes)
    assert counts.tolist() == by_hand(largest, imbalance, num_classes)
    assert counts[-1] == fractions.Fraction(largest, imbalance)
    assert tail_counts(largest, -imbalance, num_classes).tolist() == counts.tolist()[::-1]


def rows_of(partition):
    return np.concatenate([partition.server_index, *partition.client_rows])


def test_a_long_tail_of_any_source_and_partition():
    fields = {"labels": "some_clients", "imbalance": 100.0, "alpha": 0.8, "partition": "dirichlet_clients"}
    partition = make_partition(LABELS, 10, data_config(**fields), 10, 0)
    assert_no_row_twice(partition, len(LABELS))
    assert np.bincount(LABELS[rows_of(partition)]).tolist() == tail_counts(5000, 100, 10).tolist()
    # By the seed, and a longer tail is a part of a shorter one.
    other = make_partition(LABELS, 10, data_config(**fields), 10, 1)
    assert set(rows_of(other)) != set(rows_of(partition))
    shorter = make_partition(LABELS, 10, data_config(**fields | {"imbalance": 10.0}), 10, 0)
    assert set(rows_of(partition)) < set(rows_of(shorter))
    reverse = make_partition(LABELS, 10, data_config(**fields | {"imbalance": -100.0}), 10, 0)
    assert np.bincount(LABELS[rows_of(reverse)]).tolist() == tail_counts(5000, 100, 10).tolist()[::-1]


def test_the_largest_class_of_an_unequal_source_is_its_smallest():
    labels = np.repeat([0, 1, 2], [400, 90, 1000])
    for fields, counts in (
        ({"imbalance": 9.0}, [90, 30, 10]),
        ({"imbalance": -9.0}, [10, 30, 90]),
        ({}, [400, 90, 1000]),
    ):
        partition = make_partition(labels, 3, data_config(labels="clients", partition="shards", **fields), 5, 0)
        assert np.bincount(labels[rows_of(partition)]).tolist() == counts


def test_validation_images_are_balanced_and_drawn_before_the_tail():
    fields = {"labels": "clients", "imbalance": 100.0, "validation": 1000}
    partition = make_partition(LABELS, 10, data_config(**fields), 10, 0)
    assert_no_row_twice(partition, len(LABELS))
    assert np.bincount(LABELS[partition.validation_index]).tolist() == [100] * 10
    left = tail_counts(4900, 100, 10)
    assert np.all(np.bincount(LABELS[rows_of(partition)]) <= left)
    assert sizes_of(partition).tolist() == [left.sum() // 10] * 10
    without_tail = make_partition(LABELS, 10, data_config(**fields | {"imbalance": 1.0}), 10, 0)
    np.testing.assert_array_equal(partition.validation_index, without_tail.validation_index)


def chosen(labels, num_classes, num_clients, labelled, seed=0, **fields):
    """The partition of RSCFed's family, its counts [K, C], and the labelled clients."""
    fields = {"alpha": 0.8, "partition": "dirichlet_clients", "labelled_rule": "most_classes", **fields}
    config = data_config(labels="some_clients", labelled_clients=labelled, **fields)
    partition = make_partition(labels, num_classes, config, num_clients, seed)
    counts = class_counts(partition, labels, num_classes)
    known = [
        client for client, rows in enumerate(partition.client_rows) if np.isin(rows, partition.labelled_rows).any()
    ]
    assert len(partition.labelled_rows) == counts[known].sum()
    return partition, counts, known


@pytest.mark.parametrize(("num_clients", "num_classes"), [(5, 100), (50, 10)])
def test_one_labelled_client_of_the_corrected_partition(num_clients, num_classes):
    """Every class is dealt, each client has ten images or more; the labelled one is found by a plain loop."""
    labels = labels_of(num_classes)
    partition, counts, (labelled,) = chosen(labels, num_classes, num_clients, 1)
    assert counts.sum() == 50_000 and counts.sum(axis=1).min() >= 10
    assert (counts > 0).any(axis=0).all()
    best = None
    for client in range(num_clients):
        classes = sum(1 for c in range(num_classes) if counts[client, c])
        key = (classes, -abs(counts[client].sum() - 50_000 / num_clients))
        if best is None or key > best[0]:
            best = key, client
    assert labelled == best[1]
    if num_classes == 10:
        assert (counts[labelled] > 0).all()
    # The rule changes who is labelled, not who holds what.
    random, _, _ = chosen(labels, num_classes, num_clients, 1, labelled_rule="random")
    assert all(map(np.array_equal, random.client_rows, partition.client_rows))


def test_several_labelled_clients_follow_the_same_order():
    _, counts, three = chosen(CIFAR100, 100, 10, 3)
    _, _, two = chosen(CIFAR100, 100, 10, 2)
    assert set(two) < set(three)
    classes = (counts > 0).sum(axis=1)
    assert min(classes[three]) >= max(np.delete(classes, three))
