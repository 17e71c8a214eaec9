"""Partitions that are refused in one line: impossible fields, and files that do not fit."""

import re

import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.config import base_config
from fedjax_ssl.data import make_partition, partition_schemes
from fedjax_ssl.run.validation import validate
from tests.helpers.partitions import LABELS, data_config


def expect_line(words, function, *arguments):
    with pytest.raises(UserError) as error:
        function(*arguments)
    assert "\n" not in str(error.value) and re.search(words, str(error.value)), error.value


# Fields of a federation of 50,000 images of 10 classes, its number of clients, words of the line.
FIELDS = [
    ({"labels": "clients", "labelled_share": 1e-4}, 100, "labelled_share=0.0001 .* 100 clients"),
    ({"labels": "some_clients", "labelled_clients": 101}, 100, "labelled_clients=101, but only 100 of 100"),
    ({"labels": "clients"}, 50_001, "num_clients=50001 .* 50000 training"),
    ({"labels": "clients", "num_labelled": 500, "labels_per_class": 5}, 100, "num_labelled=500 and .*_per_class=5"),
    ({"labels": "clients", "num_labelled": 255}, 100, "num_labelled=255 .* 250 or 260"),
    ({"labels": "clients", "num_labelled": 90}, 100, "num_labelled=90 is fewer than num_clients=100"),
    ({"labels": "clients", "num_labelled": 60_000}, 100, "60000 .* has 5000 left"),
    ({"labels": "clients", "num_labelled": 49_990}, 100, "10 examples .* 49990 labelled images"),
    ({"partition": "profiles", "labels": "clients", "labels_per_class": 51}, 100,
     "labels_per_class=51 .* the 500 examples"),
    ({"server_labels": 60_000}, 100, "60000 .* 50000"),
    ({}, 49_751, "num_clients=49751 .* 49750 examples"),
    ({"partition": "shards", "classes_per_client": 1}, 4, "at least 3"),
    ({"partition": "shards", "classes_per_client": 9_000}, 100, "class 0 .* 4975"),
    ({"partition": "dirichlet_clients", "alpha": 1e-3}, 100, "20 draws of .*alpha=0.001"),
    ({"validation": 505}, 40, "data.validation=505 cannot be the same .* 500 or 510 would do"),
    ({"validation": 50_010}, 40, "5001 examples of each class.* 5000 .* lower data.validation"),
    ({"validation": 49_900}, 40, "data.server_labels=250 .* 100 training examples left"),
    ({"validation": 49_700, "server_labels": 290}, 40,
     "num_clients=40 .* 10 examples that 49700 validation images and 290 server images leave of 50000"),
    ({"labels": "clients", "imbalance": 0.5}, 10, "data.imbalance must be a number from 1 on, .* not 0.5"),
    ({"labels": "clients", "imbalance": 1e4}, 10, "=10000 leaves no image of class 9, for the largest class has 5000"),
    ({"labels": "profile", "label_profile": (1e-6,) * 20, "server_labels": 0}, 20,
     "data.label_profile of a client's images is not one image .*server_labels"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "num_clients", "words"), FIELDS)
def test_impossible_fields(fields, num_clients, words, monkeypatch):
    monkeypatch.setattr(partition_schemes, "MAX_DRAWS", 20)
    expect_line(words, make_partition, LABELS, 10, data_config(**fields), num_clients, 0)


# Fields that are checked before data are read, with 8 clients.
UNREAD = [
    ({"server_labels": 0}, "server_labels must be at least 1, not 0"),
    ({"unknown_classes": (1,), "partition": "natural"}, "partition='natural' says who holds what"),
    ({"unknown_classes": (1,), "partition_file": "a.npz"}, "partition_file says who holds what"),
    *(({"labels": "profile", "label_profile": profile}, words) for profile, words in (
        (("gamma(1,2)",), "or a word such as beta"),
        (("beta(0,1)",), r"two numbers from 0.001 to 1000; it has 'beta\(0,1\)'"),
        (("beta(nan,1)",), r"it has 'beta\(nan,1\)'"),
        (("beta(1)",), r"it has 'beta\(1\)'"),
        (("beta(1,1)", 0.5), "a share from 0 to 1 for each client"),
        ((0.5,) * 7 + (1.5,), "it has 1.5"),
        ((0.5,) * 7, "has 7 shares, but num_clients=8"),
    )),
    ({"labels": "profile", "label_profile": (0,) * 8, "server_labels": 0}, "nobody has a label"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), UNREAD)
def test_the_configuration_is_checked_before_data_are_read(fields, words):
    config = base_config()
    config.method, config.num_clients, config.clients_per_round = "fixmatch", 8, 4
    config.data.update(fields)
    expect_line(words, validate, config)


# Arrays of a file that differ from one that fits, and words of the line. Six examples, two clients, two classes.
AT_SERVER = {"server_index": [0, 1], "client_index": [2, 3, 4, 5], "client_size": [3, 1]}
AT_CLIENTS = {"server_index": [], "client_index": [2, 3, 4, 5], "client_size": [3, 1], "labelled_index": [3, 2, 4]}
FILES = [
    ("server", {"client_size": None}, "no client_size"),
    ("server", {"client_index": [2.0, 3, 4, 5]}, "client_index is float64"),
    ("server", {"client_size": [2, 1, 1]}, "3 clients, .* num_clients=2"),
    ("server", {"server_index": [0]}, "1 images of the server, .*server_labels=2"),
    ("server", {"client_size": [3, 2]}, "must add up to the 4 rows"),
    ("server", {"client_size": [2**63 - 1, 2**63 - 1]}, "must add up to the 4 rows"),  # more than int64 holds
    ("server", {"client_size": [5, -1]}, "client_size"),
    ("server", {"client_index": [2, 3, 4, 6]}, "row 6, .* 6 examples"),
    ("server", {"server_index": [0, -1]}, "row -1"),
    ("server", {"client_index": [2, 3, 4, 1]}, "row 1 more than once"),
    ("server", {"validation_index": [2]}, "row 2 more than once"),
    ("server", {"client_index": [2, 3, 4], "client_size": [2, 1], "validation_index": [5]}, "1 validation images"),
    ("server", {"labelled_index": [2.0]}, "labelled_index is float64"),
    ("server", {"labelled_index": [2, 1]}, "row 1 of labelled_index belongs to no client"),
    ("server", {"labelled_index": [2, 2]}, "row 2 of labelled_index .* more than once"),
    ("server", {"client_size": [4, 0]}, "a client with 4 examples, .* data.examples_per_client=3"),
    ("server", {"labelled_index": [2]}, "1 labelled examples at clients, .* not fit data.labels='server'"),
    ("clients", {"labelled_index": None}, "0 labelled examples at clients, .* data.labels='clients'"),
    ("clients", {"server_index": [0]}, "1 images of the server .* data.labels='clients'"),
    ("some_clients", {"labelled_index": [3, 2]}, "client 0 has some labels, .* data.labels='some_clients'"),
    ("some_clients", {"labelled_index": [2, 3, 4, 5]}, "2 clients have labels, .*labelled_clients=1"),
    ("profile", {"labelled_index": None}, "0 images of the server and 0 labelled examples"),
]  # fmt: skip


@pytest.mark.parametrize(("labels", "changes", "words"), FILES)
def test_partition_files_that_do_not_fit(tmp_path, labels, changes, words):
    path, good = tmp_path / "partition.npz", AT_SERVER if labels == "server" else AT_CLIENTS
    config = data_config(labels=labels, server_labels=2 * (labels == "server"), partition_file=str(path))
    config.examples_per_client = 3
    np.savez(path, **good)
    fits = make_partition(np.arange(6) % 2, 2, config, 2, 0)  # without the change
    assert fits.labelled_rows.tolist() == good.get("labelled_index", [])
    np.savez(path, **{key: value for key, value in (good | changes).items() if value is not None})
    expect_line(f"{path}.*{words}", make_partition, np.arange(6) % 2, 2, config, 2, 0)


def test_a_partition_file_with_more_examples_than_the_long_tail_does_not_fit(tmp_path):
    """Of 20 images a tail of ratio 5 keeps 10 and 2."""
    path, labels = tmp_path / "partition.npz", np.arange(20) % 2
    config = data_config(labels="server", server_labels=2, partition_file=str(path), imbalance=5.0)
    rows = [0, *range(2, 20, 2), 1, 3]
    for number, fits in ((2, True), (3, False)):
        held = [*rows[:9], *range(1, 2 * number, 2)]
        np.savez(path, server_index=held[:2], client_index=held[2:], client_size=[len(held) - 3, 1])
        if fits:
            assert len(make_partition(labels, 2, config, 2, 0).client_rows[0]) == len(held) - 3
        else:
            words = f"{path} has {len(held)} examples.* not fit data.imbalance=5.0"
            expect_line(words, make_partition, labels, 2, config, 2, 0)


def test_a_partition_file_that_is_missing(tmp_path):
    config = data_config(partition_file=str(tmp_path / "absent.npz"))
    expect_line(r"absent\.npz does not exist", make_partition, LABELS, 10, config, 100, 0)
