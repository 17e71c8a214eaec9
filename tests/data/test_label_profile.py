"""'profile': a share of labels for each client, of which the other places of labels are special cases to the bit."""

import numpy as np
import pytest

from fedjax_ssl.data import clients_may_have_labels, make_partition, save_partition, server_has_labels
from fedjax_ssl.data.partition_file import arrays_of
from tests.helpers.partitions import LABELS, assert_no_row_twice, data_config, sizes_of

CLIENTS = 20
UNEVEN = {"partition": "dirichlet_classes", "alpha": 0.3}


def drawn(seed=3, truth=LABELS, **fields):
    partition = make_partition(truth, 10, data_config(**{**UNEVEN, **fields}), CLIENTS, seed)
    assert_no_row_twice(partition, len(truth))
    return partition


def profile(shares, server_labels=0, **fields):
    return drawn(labels="profile", label_profile=shares, server_labels=server_labels, **fields)


def num_labelled(partition):
    """int [K], of each client."""
    return np.array([np.isin(rows, partition.labelled_rows).sum() for rows in partition.client_rows])


def wholly_labelled(partition):
    """1 for a client that has labels for all its images, else 0."""
    return tuple((num_labelled(partition) > 0).astype(int).tolist())


def assert_same(one, other):
    one, other = arrays_of(one), arrays_of(other)
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


# --- Special cases. --------------------------------------------------------------------------------------------------


def test_shares_of_zero_are_labels_at_the_server():
    for fields in ({}, {"server_draw": "random"}, {"validation": 100, "imbalance": 10.0}):
        assert_same(profile((0,) * CLIENTS, 250, **fields), drawn(labels="server", server_labels=250, **fields))


@pytest.mark.parametrize("share", [0.004, 0.3, 1.0])
def test_equal_shares_are_labels_at_every_client(share):
    assert_same(profile((share,) * CLIENTS), drawn(labels="clients", labelled_share=share))


def test_a_method_cannot_tell_a_special_case():
    """Programs depend on these two answers alone: methods get no other word about who has labels."""
    one = {"label_profile": (0.3,) * CLIENTS, "server_labels": 0}
    for labels, fields in {"server": {"label_profile": (0,) * CLIENTS}, "clients": one, "some_clients": one}.items():
        given, same = data_config(labels=labels), data_config(labels="profile", **fields)
        for tells in (server_has_labels, clients_may_have_labels):
            assert tells(given) == tells(same), (labels, tells)


@pytest.mark.parametrize("rule", ["random", "most_classes"])
def test_shares_of_zero_and_one_are_labels_at_some_clients(rule):
    some = drawn(labels="some_clients", labelled_clients=3, labelled_rule=rule)
    shares = wholly_labelled(some)
    assert sum(shares) == 3
    assert_same(profile(shares), some)


# --- Beyond them. ----------------------------------------------------------------------------------------------------


def test_each_client_has_its_share_and_the_server_its_own():
    shares = tuple(np.linspace(0, 1, CLIENTS).tolist())
    partition, at_server = profile(shares, 250), drawn(labels="server", server_labels=250)
    np.testing.assert_array_equal(partition.server_index, at_server.server_index)
    assert all(map(np.array_equal, partition.client_rows, at_server.client_rows))
    labelled, sizes = num_labelled(partition), sizes_of(partition)
    assert np.abs(labelled - shares * sizes).max() <= 0.5
    assert labelled[0] == 0 and labelled[-1] == sizes[-1]
    # Where one client's share grows, the others' labels stay.
    more = profile((*shares[:5], 0.9, *shares[6:]), 250)
    assert set(partition.labelled_rows) < set(more.labelled_rows)
    changed = [set(rows) & (set(more.labelled_rows) - set(partition.labelled_rows)) for rows in partition.client_rows]
    assert [bool(rows) for rows in changed] == [client == 5 for client in range(CLIENTS)]


def test_a_word_draws_the_shares_by_the_seed():
    partition = profile(("beta(0.3,0.4)",))
    shares = np.random.default_rng([3, 5]).beta(0.3, 0.4, CLIENTS)
    np.testing.assert_array_equal(num_labelled(partition), np.floor(shares * sizes_of(partition) + 0.5))
    assert_same(partition, profile(tuple(shares.tolist())))
    others = num_labelled(profile((" beta( 0.3 , 0.4 ) ",), seed=4)) / sizes_of(drawn(seed=4, server_labels=0))
    assert not np.allclose(np.sort(shares), np.sort(others), atol=0.01)
    assert np.sum((shares < 0.2) | (shares > 0.8)) > CLIENTS // 2  # some have next to none, some next to all


def test_labels_that_the_data_lack_stay_where_they_are():
    labels = np.where(np.random.default_rng(0).random(2_000) < 0.4, np.arange(2_000) % 10, -1)
    partition = profile(("beta(1,1)",), 50, truth=labels, partition="iid")
    assert np.all(labels[partition.server_index] >= 0) and len(partition.server_index) == 50
    rows = np.concatenate(partition.client_rows)
    np.testing.assert_array_equal(np.sort(partition.labelled_rows), np.sort(rows[labels[rows] >= 0]))
    least = np.bincount(labels[labels >= 0]).min()
    labels[
        [row for c in range(10) for row in np.flatnonzero(labels == c)[least:]]
    ] = -1  # the same number of each class
    partition = profile(("beta(1,1)",), 10 * int(least), truth=labels, partition="iid")
    assert len(partition.server_index) == 10 * least and not len(partition.labelled_rows)


def test_a_partition_file_brings_its_shares(tmp_path):
    path = str(tmp_path / "partition.npz")
    partition = profile(("beta(0.3,0.3)",), 250)
    save_partition(path, partition)
    assert_same(profile((), 250, partition_file=path, seed=9), partition)
    save_partition(path, drawn(labels="server", server_labels=250))
    assert len(profile((), 250, partition_file=path).labelled_rows) == 0
