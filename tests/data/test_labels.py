"""Labels at clients: how many each one has, which, and that a file keeps them; counted by plain loops."""

import numpy as np
import pytest

from fedjax_ssl.data import class_counts as who_holds_what
from fedjax_ssl.data import make_partition
from tests.helpers.partitions import LABELS, assert_no_row_twice, class_counts, data_config, labels_of, sizes_of


def labelled_counts(partition, labels=LABELS, num_classes=10):
    """[K, C], labelled examples of each class at each client, by a plain loop."""
    labelled, counts = set(partition.labelled_rows.tolist()), np.zeros((len(partition.client_rows), num_classes), int)
    for client, rows in enumerate(partition.client_rows):
        for row in rows.tolist():
            counts[client, labels[row]] += row in labelled
    return counts


def make_labelled(num_clients=40, seed=3, truth=LABELS, num_classes=10, **fields):
    fields = {"labels": "clients", "partition": "dirichlet_classes", "server_labels": 0, **fields}
    partition = make_partition(truth, num_classes, data_config(**fields), num_clients, seed)
    assert len(partition.server_index) == 0
    assert_no_row_twice(partition, len(truth))
    assert partition.labelled_rows.dtype == np.int32
    assert len(np.unique(partition.labelled_rows)) == len(partition.labelled_rows)
    assert labelled_counts(partition, truth, num_classes).sum() == len(partition.labelled_rows)  # all are at clients
    counted = who_holds_what(truth, partition, num_classes)
    np.testing.assert_array_equal(counted["labelled"], labelled_counts(partition, truth, num_classes))
    np.testing.assert_array_equal(counted["clients"], class_counts(partition, truth, num_classes))
    assert counted["server"].tolist() == [0] * num_classes
    return partition


@pytest.mark.parametrize("share", [0.004, 0.1, 0.5, 1.0])
def test_each_client_has_a_labelled_share(share):
    partition = make_labelled(labelled_share=share, alpha=0.1)
    sizes, labelled = sizes_of(partition), labelled_counts(partition).sum(axis=1)
    assert np.abs(labelled - share * sizes).max() <= 0.5 and len(np.unique(sizes)) > 30


def test_a_labelled_share_of_few_examples():
    few = make_labelled(4, truth=labels_of(2, 12), num_classes=2, partition="iid", labelled_share=0.5)
    assert sizes_of(few).tolist() == [3] * 4
    assert labelled_counts(few, labels_of(2, 12), 2).sum(axis=1).tolist() == [2] * 4  # 1.5 is rounded up
    few = make_labelled(4, truth=labels_of(2, 20), num_classes=2, partition="iid", labelled_share=0.25)
    assert labelled_counts(few, labels_of(2, 20), 2).sum(axis=1).tolist() == [1] * 4  # 1.25 down


def test_labels_per_class():
    labels = labels_of(10, 2_000)
    partition = make_labelled(truth=labels, labels_per_class=3, alpha=0.3)
    held = class_counts(partition, labels, 10)
    assert {0, 1, 2} <= set(held.ravel())  # classes of which a client has too few
    np.testing.assert_array_equal(labelled_counts(partition, labels), np.minimum(held, 3))


def test_a_limit_on_clients_comes_before_their_labels():
    partition = make_labelled(labelled_share=0.1, examples_per_client=50, alpha=1.0)
    assert labelled_counts(partition).sum(axis=1).tolist() == [5] * 40


@pytest.mark.parametrize("number", [1, 3, 40])
def test_some_clients_are_labelled_wholly(number):
    partition = make_labelled(labels="some_clients", labelled_clients=number, alpha=1.0)
    labelled, sizes = labelled_counts(partition).sum(axis=1), sizes_of(partition)
    assert np.all((labelled == 0) | (labelled == sizes)) and np.count_nonzero(labelled) == number


def test_the_labelled_clients_are_drawn_by_the_seed_among_those_with_images():
    config = {"labels": "some_clients", "labelled_clients": 2, "alpha": 0.3}
    chosen = []
    for seed in range(20):
        partition = make_labelled(200, seed, labels_of(10, 300), **config)
        labelled = np.flatnonzero(labelled_counts(partition, labels_of(10, 300)).sum(axis=1))
        assert len(labelled) == 2 and (sizes_of(partition) == 0).any()
        chosen.append(tuple(labelled))
    assert len(set(chosen)) > 15


def test_where_labels_are_does_not_change_who_has_which_images():
    share, per_class, some = (
        make_labelled(alpha=0.5, **fields)
        for fields in ({"labelled_share": 0.3}, {"labels_per_class": 2}, {"labels": "some_clients"})
    )
    for other in (per_class, some):
        assert all(map(np.array_equal, share.client_rows, other.client_rows))
        assert not np.array_equal(share.labelled_rows, other.labelled_rows)
    rng = np.random.default_rng([3, 2])  # a stream of their own, by the seed
    expected = [rng.permutation(rows)[: int(0.3 * len(rows) + 0.5)] for rows in share.client_rows]
    np.testing.assert_array_equal(share.labelled_rows, np.concatenate(expected))
    # More labels are those that there were, and others.
    assert set(make_labelled(alpha=0.5, labelled_share=0.1).labelled_rows) < set(share.labelled_rows)
    assert set(per_class.labelled_rows) < set(make_labelled(alpha=0.5, labels_per_class=5).labelled_rows)
    more = make_labelled(alpha=0.5, labels="some_clients", labelled_clients=4)
    assert set(some.labelled_rows) < set(more.labelled_rows)
