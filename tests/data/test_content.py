"""Data are known by their content: checksums by a plain loop, and what a partition file refuses and warns of."""

import hashlib

import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.files import replace_arrays
from fedjax_ssl.data import dataset_facts, load_dataset, make_partition, save_partition
from fedjax_ssl.data.content import WORDS, arrays_of_data, checksums, what_differs
from fedjax_ssl.data.partition_file import check_data
from tests.helpers.partitions import data_config

RANDOM = np.random.default_rng(0)
ARRAYS = {
    "x_train": RANDOM.integers(0, 256, (40, 4, 4), np.uint8),
    "y_train": np.arange(40) % 2,
    "x_test": RANDOM.integers(0, 256, (6, 4, 4), np.uint8),
    "y_test": np.arange(6) % 2,
    "client_train": np.arange(40) % 2,
    "domain_train": np.arange(40) % 2,
    "domain_test": np.arange(6) % 2,
}
KEYS = {"train_inputs": "x_train", "train_labels": "y_train", "test_inputs": "x_test", "test_labels": "y_test",
        "owners": "client_train", "domains": "domain_test"}  # fmt: skip


def loaded(path, **arrays):
    replace_arrays(path, **{**ARRAYS, **arrays})
    return load_dataset(data_config(source="npz", path=str(path)))


def test_each_example_has_its_checksum_under_any_file_name(tmp_path):
    images = [*ARRAYS["x_train"], *ARRAYS["x_test"]]
    by_hand = [int.from_bytes(hashlib.sha256(image.tobytes()).digest()[:8], "little") for image in images]
    one, other = loaded(tmp_path / "a.npz"), loaded(tmp_path / "b.npz")
    assert one.row_sums.tolist() == other.row_sums.tolist() == by_hand
    assert dataset_facts(one)["content"] == checksums(other)


@pytest.mark.parametrize("name", WORDS)
def test_what_two_data_sets_differ_in(tmp_path, name):
    """Two examples of one class are exchanged, or two labels, clients or domains."""
    key = KEYS[name]
    order = np.arange(len(ARRAYS[key]))
    order[[0, 2 if "inputs" in name else 1]] = order[[2 if "inputs" in name else 1, 0]]
    then, now = loaded(tmp_path / "a.npz"), loaded(tmp_path / "a.npz", **{key: ARRAYS[key][order]})
    assert what_differs(checksums(then), checksums(now)) == WORDS[name]
    assert [other for other in WORDS if checksums(then)[other] != checksums(now)[other]] == [name]


def test_a_partition_file_beside_other_data(tmp_path, capsys):
    dataset, path = loaded(tmp_path / "a.npz"), str(tmp_path / "partition.npz")
    config = data_config(partition="iid", server_labels=4)
    partition = make_partition(dataset.y_train, 2, config, 4, 0)
    save_partition(path, partition, **arrays_of_data(dataset))
    check_data(path, loaded(tmp_path / "renamed.npz", x_test=ARRAYS["x_test"][::-1]))  # it has no test examples
    assert capsys.readouterr().err == ""
    # The same classes at the same rows, but other images in four of them.
    order = np.arange(40)
    order[:4] = [2, 3, 0, 1]
    check_data(path, loaded(tmp_path / "a.npz", x_train=ARRAYS["x_train"][order]))
    assert "warning" in (line := capsys.readouterr().err) and "4 of 40 training examples have other inputs" in line
    order = RANDOM.permutation(40)
    permuted = loaded(tmp_path / "a.npz", x_train=ARRAYS["x_train"][order], y_train=ARRAYS["y_train"][order])
    with pytest.raises(UserError, match=r"partition\.npz was drawn for data with other training labels"):
        check_data(path, permuted)
    save_partition(path, partition)  # as one that was written by hand
    check_data(path, permuted)
