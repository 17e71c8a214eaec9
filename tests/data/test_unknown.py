"""Images of no class of the model: how they are set apart and dealt, against plain NumPy."""

import numpy as np
import pytest

from fedjax_ssl import UserError
from fedjax_ssl.data import Dataset, make_partition
from fedjax_ssl.data.federated import hold, put_whole
from fedjax_ssl.data.owners import class_counts
from fedjax_ssl.data.unknown import UNKNOWN, set_apart
from fedjax_ssl.data.views import Views
from fedjax_ssl.records.clients import client_sizes
from tests.helpers.partitions import data_config

NUM_TRAIN, NUM_TEST, CLIENTS = 400, 60, 6


def small_dataset():
    """Five classes in an order of their own."""
    rng = np.random.default_rng(0)
    x, test = (rng.integers(0, 256, (number, 4, 4, 1), np.uint8) for number in (NUM_TRAIN, NUM_TEST))
    y, y_test = (rng.permutation(np.arange(number) % 5) for number in (NUM_TRAIN, NUM_TEST))
    return Dataset("small", x, y.astype(np.int32), test, y_test.astype(np.int32), 5, (0.5,), (0.5,), flip=False)


def unknown_config(**fields):
    return data_config(**{"server_labels": 12, "examples_per_client": 20} | fields)


def divided(config, seed=0, dataset=None):
    dataset = dataset or set_apart(small_dataset(), config)
    return dataset, make_partition(dataset.y_train, dataset.num_classes, config, CLIENTS, seed)


def test_named_classes_are_set_apart():
    """Class 0, 2 and 4 become 0, 1 and 2; a label that nobody knows stays one; training images stay where they are."""
    dataset = small_dataset()
    dataset.y_train[5] = -1
    found = set_apart(dataset, unknown_config(unknown_classes=(3, 1)))
    expected = {-1: -1, 0: 0, 1: UNKNOWN, 2: 1, 3: UNKNOWN, 4: 2}
    assert found.y_train.tolist() == [expected[label] for label in dataset.y_train.tolist()]
    assert found.num_classes == 3 and found.class_names == ("0", "2", "4") and found.x_train is dataset.x_train
    is_known = ~np.isin(dataset.y_test, (1, 3))
    np.testing.assert_array_equal(found.x_test, dataset.x_test[is_known])
    np.testing.assert_array_equal(found.unknown_test, dataset.x_test[~is_known])
    assert found.y_test.tolist() == [expected[label] for label in dataset.y_test[is_known].tolist()]


@pytest.mark.parametrize("labels", ["server", "clients", "some_clients"])
def test_clients_hold_the_same_known_images_whatever_their_share_of_unknown_ones(labels):
    """They are those of the data set without its unknown images; server, validation and labels have none of these."""
    fields = {"unknown_classes": (0, 4), "labels": labels, "labelled_clients": 2, "validation": 9}
    dataset = set_apart(small_dataset(), unknown_config(**fields))
    rows = np.flatnonzero(dataset.y_train != UNKNOWN)
    alone = make_partition(dataset.y_train[rows], 3, unknown_config(**fields), CLIENTS, 0)
    for share in (0.0, 0.25, 0.5):
        _, partition = divided(unknown_config(**fields, unknown_share=share))
        for name in ("server_index", "labelled_rows", "validation_index"):
            np.testing.assert_array_equal(getattr(partition, name), rows[getattr(alone, name)])
        at_clients = np.concatenate(partition.client_rows)
        assert len(np.unique(at_clients)) == len(at_clients) and at_clients.dtype == np.int32
        counted, sizes = class_counts(dataset.y_train, partition, 3), list(map(len, partition.client_rows))
        unknown = [np.sum(dataset.y_train[mine] == UNKNOWN) for mine in partition.client_rows]
        np.testing.assert_array_equal(client_sizes(counted), sizes)
        np.testing.assert_array_equal(counted.get("unknown", np.zeros(CLIENTS)), unknown)
        for mine, theirs in zip(partition.client_rows, alone.client_rows):
            is_unknown = dataset.y_train[mine] == UNKNOWN
            assert set(mine[~is_unknown]) == set(rows[theirs])
            holds_labels = labels == "some_clients" and np.isin(rows[theirs], partition.labelled_rows).any()
            expected = 0 if holds_labels else int(len(theirs) * share / (1 - share) + 0.5)
            assert np.sum(is_unknown) == expected and (share == 0 or holds_labels or expected > 0)


def test_unknown_images_are_dealt_regardless_of_their_classes():
    """Which class they had changes not one number of the federation."""
    config, dataset = unknown_config(unknown_classes=(1, 3)), small_dataset()
    other = dataset._replace(
        y_train=np.where(np.isin(dataset.y_train, (1, 3)), 4 - dataset.y_train, dataset.y_train),
        y_test=np.where(np.isin(dataset.y_test, (1, 3)), 4 - dataset.y_test, dataset.y_test),
    )
    assert np.any(other.y_train != dataset.y_train)
    held = [hold(*divided(config, dataset=set_apart(each, config)), seed=0) for each in (dataset, other)]
    for first, second in zip(*held):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("bound", [{}, {"reveal_labels": True}, {"centralised": True}])
def test_nobody_sees_that_an_image_is_unknown(bound):
    dataset, partition = divided(unknown_config(unknown_classes=(0, 2)))
    held = hold(dataset, partition, 0, **bound)
    unknown = held.hidden_labels == UNKNOWN
    assert unknown[held.rows].sum() == CLIENTS * 7 and not unknown[held.server_index].any()
    assert (held.visible_labels[unknown] == -1).all()
    assert (held.visible_labels[held.rows][~unknown[held.rows]] >= 0).all() == bool(bound)


@pytest.mark.parametrize("on_device", [True, False])
def test_views_have_unknown_images(on_device):
    held = hold(*divided(unknown_config(unknown_classes=(0, 2))), seed=0)
    width = int(held.sizes.max())
    views = Views(held, (width,), 2, on_device)
    view, hidden = views.of(np.array([1, 4]), width)
    whole, _ = put_whole(held)
    np.testing.assert_array_equal(view.unknown_inputs, whole.unknown_inputs)
    assert view.unknown_inputs.shape == views.shapes(width)[0].unknown_inputs.shape == held.unknown_inputs.shape
    for client in (1, 4):
        of_client = np.asarray(hidden)[np.asarray(view.rows_of(client))[: held.sizes[client]]]
        np.testing.assert_array_equal(of_client, held.hidden_labels[held.rows_of(client)])
        assert np.sum(of_client == UNKNOWN) == 7


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"unknown_classes": (5,)}, r"unknown_classes=\(5,\): the data have the classes 0 to 4"),
        ({"unknown_classes": (0, 1, 2, 3)}, "which the model needs to know at least 2"),
        ({"unknown_classes": (1,), "unknown_share": 0.9}, r"takes 1080 unknown images, but there are 80"),
    ],
)
def test_what_the_data_set_does_not_have(fields, words):
    with pytest.raises(UserError, match=words):
        divided(unknown_config(**fields))
