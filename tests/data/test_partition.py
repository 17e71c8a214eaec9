"""Partitions: what each scheme promises, on synthetic labels of CIFAR's size and with other numbers of classes."""

import numpy as np
import pytest

from fedjax_ssl.data import PARTITIONS, make_partition
from fedjax_ssl.data.labels import draw_server_labels
from fedjax_ssl.data.partition_schemes import dirichlet_classes, dirichlet_clients
from tests.helpers.partitions import LABELS, assert_no_row_twice, class_counts, data_config, labels_of, sizes_of


@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize("num_classes", [2, 10, 100])
def test_every_scheme_with_any_number_of_classes(name, num_classes):
    labels = labels_of(num_classes, 20_000)
    config = data_config(partition=name, server_labels=2 * num_classes, alpha=0.5)
    partition = make_partition(labels, num_classes, config, 50, seed=1)
    assert_no_row_twice(partition, len(labels))
    assert len(partition.client_rows) == 50
    np.testing.assert_array_equal(np.bincount(labels[partition.server_index], minlength=num_classes), 2)
    left = len(labels) - len(partition.server_index)
    if name in ("iid", "lda", "main_class"):
        assert set(sizes_of(partition)) == {left // 50}
    elif name == "profiles":  # of classes that have run out clients get fewer
        assert sizes_of(partition).max() == left // 50 and sizes_of(partition).min() > 0
    else:  # Every example that is no anchor belongs to exactly one client.
        assert sizes_of(partition).sum() == left
    counts = class_counts(partition, labels, num_classes)
    assert (counts.sum(axis=0) > 0).all()  # Every class was dealt, not the first ten only.


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_share_of_each_client_is_of_its_main_class(share):
    """Of 4,500 images 45 R are of class k mod 10, besides its tenth of what is left; with R = 1 there is no other."""
    labels = labels_of(10, 4_500)
    config = data_config(partition="main_class", main_share=share, labels="clients")
    counts = class_counts(make_partition(labels, 10, config, 100, 0), labels, 10)
    assert set(counts.sum(axis=1)) == {45}
    main = counts[np.arange(100), np.arange(100) % 10]
    assert np.all(main >= int(45 * share))
    # The rest is of all classes alike: each mean of 100 clients within 5 deviations of a draw of so many.
    rest, beside = 45 - int(45 * share), main - int(45 * share)
    assert abs(beside.mean() - rest / 10) <= 5 * np.sqrt(rest * 0.09 / 100)


def test_a_main_class_that_has_run_out_is_filled_up():
    labels = np.repeat([0, 1], [30, 970])
    config = data_config(partition="main_class", main_share=0.5, labels="clients")
    counts = class_counts(make_partition(labels, 2, config, 10, 0), labels, 2)
    assert set(counts.sum(axis=1)) == {100} and counts[:, 0].tolist() == [30, *[0] * 9]


def test_lda_with_small_shares_still_follows_dirichlet():
    # 500 of 49,750 examples are dealt: no class runs out, so the counts of a client are Dirichlet-multinomial,
    # with a second moment that is known: E[n_c (n_c - 1)] = n (n - 1) (alpha + 1) alpha / (A (A + 1)), A = 10 alpha.
    config = data_config(alpha=0.5, examples_per_client=20)
    pairs = []
    for seed in range(20):
        partition = make_partition(LABELS, 10, config, 100, seed)
        assert sizes_of(partition).tolist() == [20] * 100
        counts = class_counts(partition, LABELS, 10)
        pairs.append((counts * (counts - 1)).sum(axis=1))
    pairs = np.concatenate(pairs)
    expected = 10 * 20 * 19 * (1.5 * 0.5) / (5.0 * 6.0)
    assert abs(pairs.mean() - expected) < 4 * pairs.std() / np.sqrt(len(pairs))


def test_lda_goes_on_when_classes_run_out():
    # All examples are dealt and alpha is so small that most clients' mass lies on classes that have run out.
    for alpha in (1e-6, 1e-3, 0.1):
        config = data_config(alpha=alpha, server_labels=0)
        partition = make_partition(LABELS, 10, config, 100, 0)
        assert sizes_of(partition).tolist() == [500] * 100
        assert_no_row_twice(partition, 50_000)


def test_clients_of_fewer_images_than_there_are_classes():
    for name in PARTITIONS:
        if name != "dirichlet_clients":  # Which promises 10 examples each and must refuse.
            partition = make_partition(labels_of(10, 5_000), 10, data_config(partition=name), 1_000, 0)
            assert len(partition.client_rows) == 1_000
            assert_no_row_twice(partition, 5_000)


def test_dirichlet_clients_capacity_and_least_size():
    for alpha in (0.1, 0.3, 10.0):
        partition = make_partition(LABELS, 10, data_config(partition="dirichlet_clients", alpha=alpha), 100, 0)
        counts = class_counts(partition, LABELS, 10)
        assert counts.sum(axis=1).min() >= 10
        # Classes are dealt in order: a client that had reached n / K before a class has none of it.
        held = np.cumsum(counts, axis=1)[:, :-1]
        is_full = held >= 49_750 / 100
        assert is_full.any() and (counts[:, 1:][is_full] == 0).all()


def test_dirichlet_clients_follow_alpha():
    # Of the first class, before anybody is full: E[sum_k p_k^2] = (alpha + 1) / (K alpha + 1), p ~ Dir(alpha).
    labels, squares = np.repeat(np.arange(10), 500), []
    for seed in range(200):
        shares = dirichlet_clients(labels, 10, data_config(alpha=0.5), np.random.default_rng(seed))
        squares.append(sum((np.sum(labels[rows] == 0) / 500) ** 2 for rows in shares))
    assert abs(np.mean(squares) - 1.5 / 6) < 4 * np.std(squares) / np.sqrt(200)


def test_dirichlet_classes_normalises_columns():
    """The proportions are drawn after each class has been shuffled once."""
    labels, rng = np.sort(labels_of(5, 10_000)), np.random.default_rng(0)
    for _ in range(5):
        rng.permutation(2000)
    p = rng.dirichlet([0.1] * 5, 30)
    shares = dirichlet_classes(labels, 30, data_config(alpha=0.1), np.random.default_rng(0))
    counts = np.stack([np.bincount(labels[rows], minlength=5) for rows in shares])
    assert np.abs(counts - 2000 * p / p.sum(axis=0)).max() <= 1
    np.testing.assert_array_equal(counts.sum(axis=0), 2000)


def test_dirichlet_classes_of_a_tiny_alpha_are_each_one_client_s():
    """All clients' probability of some class is 0; a client of one class has all of it."""
    labels = np.repeat(np.arange(10), 20)
    for seed in range(5):
        with np.errstate(all="raise"):
            shares = dirichlet_classes(labels, 3, data_config(alpha=1e-6), np.random.default_rng(seed))
        counts = np.stack([np.bincount(labels[rows], minlength=10) for rows in shares])
        np.testing.assert_array_equal(counts.sum(axis=0), 20)
        assert np.sum(counts.max(axis=0) == 20) >= 7


def test_no_client_gains_from_rounding_in_every_class():
    """Half an image of each class for each client; in a fixed order of clients one would have nothing."""
    shares = dirichlet_classes(np.repeat(np.arange(400), 2), 4, data_config(alpha=1e6), np.random.default_rng(0))
    assert min(map(len, shares)) > 150  # of 800


def test_shards_classes_per_client():
    for per_client, num_classes in (2, 10), (3, 10), (1, 100), (20, 100):
        labels = labels_of(num_classes)
        config = data_config(partition="shards", classes_per_client=per_client, server_labels=0)
        partition = make_partition(labels, num_classes, config, 100, 0)
        classes = (class_counts(partition, labels, num_classes) > 0).sum(axis=1)
        assert classes.max() == per_client and classes.min() >= 1
        assert np.ptp(sizes_of(partition)) <= 0.6 * sizes_of(partition).mean()


def test_examples_per_client_is_a_limit_on_each_share():
    whole = make_partition(LABELS, 10, data_config(partition="dirichlet_clients", alpha=0.3), 100, 0)
    config = data_config(partition="dirichlet_clients", alpha=0.3, examples_per_client=100)
    limited = make_partition(LABELS, 10, config, 100, 0)
    np.testing.assert_array_equal(sizes_of(limited), np.minimum(sizes_of(whole), 100))
    for few, all_rows in zip(limited.client_rows, whole.client_rows):
        assert set(few) <= set(all_rows)


def test_random_anchors():
    rng = np.random.default_rng(0)
    rows = draw_server_labels(LABELS, 1003, 10, rng, balanced=False)
    counts = np.bincount(LABELS[rows])
    assert len(np.unique(rows)) == 1003 and np.ptp(counts) > 1
    config = data_config(server_draw="random", server_labels=77)
    assert len(make_partition(LABELS, 10, config, 10, 0).server_index) == 77
