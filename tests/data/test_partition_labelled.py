"""Partitions of work in which every client has a few labels: SAGE's pairs, FedMatch's profiles, labels apart."""

import itertools

import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data import PARTITIONS, make_partition
from fedjax_ssl.data.partition_schemes import dirichlet_pairs, profiles
from tests.helpers.partitions import LABELS, assert_no_row_twice, class_counts, data_config, labels_of, sizes_of


def pairs_of(labels, num_clients, alpha, seed=0):
    """Each pair's labels as `dirichlet_pairs` lays them out, where the pairs have equal parts."""
    shares = dirichlet_pairs(labels, num_clients, data_config(alpha=alpha), np.random.default_rng(seed))
    assert np.array_equal(np.sort(np.concatenate(shares)), np.arange(len(labels)))
    return [labels[np.concatenate(pair)] for pair in zip(shares[::2], shares[1::2])]


def members_of(pair):
    """A pair's labels of its first member and of its second: classes ascend in each, so they meet at a descent.

    Where the first has one class alone there may be none, and the result is None.
    """
    boundary = np.flatnonzero(np.diff(pair) < 0) + 1
    assert len(boundary) <= 1
    return np.split(pair, boundary) if len(boundary) else None


@pytest.mark.parametrize("num_clients", [1, 20, 33])
def test_pairs_have_equal_shares(num_clients):
    labels = labels_of(10, 10_003)
    shares = dirichlet_pairs(labels, num_clients, data_config(alpha=0.1), np.random.default_rng(0))
    sizes = np.array(list(map(len, shares)))
    larger = 10_003 % num_clients
    assert sizes.tolist() == [10_003 // num_clients + 1] * larger + [10_003 // num_clients] * (num_clients - larger)
    assert np.array_equal(np.sort(np.concatenate(shares)), np.arange(10_003))


def test_pairs_share_parts_of_the_mixture_of_the_whole():
    """A pair's counts are of draws without replacement; 4.5 deviations, of 100 counts."""
    counts = np.stack([np.bincount(pair, minlength=10) for pair in pairs_of(LABELS, 20, 0.1)])
    assert counts.sum(axis=1).tolist() == [5000] * 10
    assert np.abs(counts - 500).max() < 4.5 * np.sqrt(500 * 0.9 * 0.9)


def test_a_pair_divides_each_class_by_its_dirichlet_draw():
    """Of the first class, before anybody can be full: the larger part is max(p, 1 - p), p ~ Beta(alpha, alpha)."""
    rng = np.random.default_rng(1)
    for alpha in (0.1, 1.0, 100.0):
        p = rng.beta(alpha, alpha, 100_000)
        larger = []
        for pair in pairs_of(LABELS, 400, alpha):
            first, second = members_of(pair)
            parts = np.array([np.sum(first == 0), np.sum(second == 0)])
            larger.append(parts.max() / parts.sum())
        expected = np.maximum(p, 1 - p)
        # A class of a pair has about 25 images, so that rounding moves a part by at most 1/25, on average not at all.
        assert abs(np.mean(larger) - expected.mean()) < 4 * expected.std() / np.sqrt(200) + 0.01


def test_members_of_a_pair_have_at_least_a_quarter_and_are_cut_off_at_half():
    labels = np.repeat([0, 1, 2], [8_000, 1_000, 1_000])
    smallest = []
    pairs = itertools.chain(*(pairs_of(labels, 20, 0.5, seed) for seed in range(10)))
    for members in filter(None, map(members_of, pairs)):
        smallest.append(min(map(len, members)))
        for member in members:
            counts = np.bincount(member, minlength=3)
            held = np.cumsum(counts)[:-1]
            assert (counts[1:][held >= 500] == 0).all()
    # 800 of the first class are divided anyhow: many members would have fewer than 250 of the 1,000.
    assert len(smallest) > 30 and min(smallest) >= 250 and min(smallest) < 300
    config = data_config(partition="dirichlet_pairs", alpha=1e-4, labels="clients")
    with pytest.raises(UserError, match=r"1000 draws of 100 examples for 2 clients .*alpha=0\.0001 gave"):
        make_partition(np.repeat([0, 1], [990, 10]), 2, config, 20, 0)  # hardly any of one class to be divided


@pytest.mark.parametrize("images", [0, 120])
def test_every_client_has_as_many_of_each_class(images):
    """FedMatch's batch-IID: a hundredth of each class; with an uneven rest all is dealt, to within one."""
    config = data_config(partition="stratified", labels="clients", labels_per_class=5, examples_per_client=images)
    partition = make_partition(LABELS, 10, config, 100, 0)
    assert np.all(class_counts(partition, LABELS, 10) == (images or 500) // 10)
    labelled = np.bincount(LABELS[partition.labelled_rows], minlength=10)
    np.testing.assert_array_equal(labelled, 500)
    uneven = np.repeat(np.arange(4), [101, 30, 7, 55])
    config = data_config(partition="stratified", labels="clients", examples_per_client=images and 10)
    partition = make_partition(uneven, 4, config, 12, 0)
    counts = class_counts(partition, uneven, 4)
    assert_no_row_twice(partition, len(uneven))
    assert counts.sum() == (120 if images else len(uneven))
    assert np.all(np.ptp(counts, axis=0) <= 1) and np.ptp(counts.sum(axis=1)) <= 1
    np.testing.assert_allclose(counts.sum(axis=0), np.bincount(uneven) * counts.sum() / len(uneven), atol=1)


@pytest.mark.parametrize(
    ("num_classes", "expected"),
    [
        (2, [0.5 / 0.65, 0.15 / 0.65]),
        (5, [0.5, 0.15, 0.1, 0.1, 0.15]),
        (10, [0.5, 0.15, 0.03, 0.03, 0.03, 0.02, 0.03, 0.03, 0.03, 0.15]),  # FedMatch's
    ],
)
def test_profiles_of_each_number_of_classes(num_classes, expected):
    """Many clients of equal size: no class runs out; within 4.5 deviations of a draw."""
    labels = labels_of(num_classes, 60_000)
    shares = profiles(labels, 20, data_config(examples_per_client=1000), np.random.default_rng(0))
    counts = sum(np.roll(np.bincount(labels[rows], minlength=num_classes), -k) for k, rows in enumerate(shares))
    shares = np.array(expected)
    assert (np.abs(counts / 20_000 - shares) < 4.5 * np.sqrt(shares * (1 - shares) / 20_000)).all()


def test_profiles_take_what_is_left_of_a_class():
    labels = labels_of(10, 1_000)
    partition = make_partition(labels, 10, data_config(partition="profiles", labels="clients"), 5, 0)
    assert_no_row_twice(partition, 1_000)
    counts = class_counts(partition, labels, 10)
    # Five clients of 200: classes 1 to 3 are wanted more often than there are, and go to whoever comes first.
    assert counts[:, 1:4].sum(axis=0).tolist() == [100] * 3
    assert sizes_of(partition).max() == 200 > sizes_of(partition).min()


def test_profiles_leave_the_labelled_images_balanced():
    """FedMatch with labels at the clients: 5 of each class, and 490 by the profile."""
    config = data_config(partition="profiles", labels="clients", labels_per_class=5)
    labels = labels_of(10, 54_000)
    partition = make_partition(labels, 10, config, 100, 0)
    assert_no_row_twice(partition, 54_000)
    known = set(partition.labelled_rows.tolist())
    for client, rows in enumerate(partition.client_rows):
        is_known = np.array([row in known for row in rows.tolist()])
        assert np.bincount(labels[rows[is_known]], minlength=10).tolist() == [5] * 10
        if client < 50:
            assert np.sum(~is_known) == 490
    # With labels elsewhere the number is not read.
    server = data_config(partition="profiles", labels_per_class=5, server_labels=0)
    counts = class_counts(make_partition(labels, 10, server, 1000, 0), labels, 10)
    assert (counts.min(axis=1) < 5).any()


def test_profiles_need_enough_of_each_class():
    labels = np.concatenate([labels_of(2, 1_000), np.full(30, 2)])
    config = data_config(partition="profiles", labels="clients", labels_per_class=4)
    with pytest.raises(UserError, match="class 2 has 30 examples"):
        make_partition(labels, 3, config, 10, 0)
    config.labels_per_class = 3
    assert len(make_partition(labels, 3, config, 10, 0).labelled_rows) == 10 * 3 * 3


@pytest.mark.parametrize("name", ["lda", "dirichlet_pairs", "shards"])
def test_labelled_images_apart_are_divided_by_draws_of_their_own(name):
    config = data_config(partition=name, alpha=0.3, labels="clients", num_labelled=1000, validation=100)
    partition = make_partition(LABELS, 10, config, 20, seed=3)
    assert_no_row_twice(partition, 50_000)
    assert len(partition.server_index) == 0 and partition.labelled_rows.dtype == np.int32
    # The pool is balanced, and drawn before the shares, which are the same function's, of other examples.
    client_rng, label_rng, validation_rng = (np.random.default_rng([3, stream]) for stream in (1, 2, 3))
    held_out = [validation_rng.permutation(np.flatnonzero(c == LABELS))[:10] for c in range(10)]
    rest = np.setdiff1d(np.arange(50_000), np.concatenate(held_out))
    pool = [label_rng.permutation(np.flatnonzero(LABELS[rest] == c))[:100] for c in range(10)]
    pool = rest[label_rng.permutation(np.concatenate(pool))]
    others = np.setdiff1d(rest, pool)
    unlabelled = PARTITIONS[name](LABELS[others], 20, config, client_rng)
    labelled = PARTITIONS[name](LABELS[pool], 20, config, label_rng)
    for rows, one, other in zip(partition.client_rows, labelled, unlabelled, strict=True):
        assert set(rows.tolist()) == {*pool[one].tolist(), *others[other].tolist()}
        known = np.isin(rows, partition.labelled_rows)
        assert set(rows[known].tolist()) == set(pool[one].tolist())
        if len(one) > 5:  # anywhere among a client's rows
            assert known[: len(one)].sum() < len(one)
    in_order = [rows[np.isin(rows, partition.labelled_rows)] for rows in partition.client_rows]
    sizes = np.cumsum([len(rows) for rows in in_order])[:-1]
    for rows, listed in zip(in_order, np.split(partition.labelled_rows, sizes)):
        assert set(rows.tolist()) == set(listed.tolist())  # client by client


def test_a_limit_on_clients_keeps_the_labelled_images_apart():
    config = data_config(partition="dirichlet_pairs", labels="clients", num_labelled=1000, examples_per_client=80)
    partition = make_partition(LABELS, 10, config, 20, 0)
    assert sizes_of(partition).tolist() == [80] * 20
    assert [np.isin(rows, partition.labelled_rows).sum() for rows in partition.client_rows] == [50] * 20
    config.examples_per_client = 30
    partition = make_partition(LABELS, 10, config, 20, 0)
    assert_no_row_twice(partition, 50_000)
    assert set(partition.labelled_rows) == set(np.concatenate(partition.client_rows))
    assert sizes_of(partition).tolist() == [30] * 20 and len(partition.labelled_rows) == 600


def test_the_number_apart_is_of_labels_at_clients_alone():
    base = make_partition(LABELS, 10, data_config(), 20, 0)
    same = make_partition(LABELS, 10, data_config(num_labelled=1000), 20, 0)
    assert all(map(np.array_equal, base.client_rows, same.client_rows)) and len(same.labelled_rows) == 0


@pytest.mark.parametrize(("num_labelled", "of_each"), [(200, 10), (2000, 90)])
def test_a_client_s_test_images_count_among_its_limit(num_labelled, of_each):
    fields = {"num_labelled": num_labelled, "examples_per_client": 120, "client_test_share": 0.25, "server_labels": 0}
    partition = make_partition(LABELS, 10, data_config(labels="clients", partition="iid", **fields), 20, 0)
    for rows, tests in zip(partition.client_rows, partition.client_test_rows, strict=True):
        assert len(rows) == 90 and len(tests) == 30 and np.isin(rows, partition.labelled_rows).sum() == of_each
    assert len(partition.labelled_rows) == 20 * of_each
