"""The federation's device arrays: what is visible, what is padded, what is kept apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import UserError
from fedjax_ssl.data import Dataset, Partition, federate, stack_seeds
from fedjax_ssl.data.federated import hold
from fedjax_ssl.engine.round import init_key


def small_federation():
    x, x_test = (np.random.default_rng(0).integers(0, 256, (number, 4, 4, 1), np.uint8) for number in (12, 5))
    y, y_test = ((np.arange(number) % 3).astype(np.int32) for number in (12, 5))
    dataset = Dataset("small", x, y, x_test, y_test, 3, mean=(0.5,), std=(0.5,), flip=False)
    rows = [np.array(rows, np.int32) for rows in ([7, 2, 9], [], [4], [0, 11])]
    return dataset, Partition(np.array([5, 1, 3], np.int32), rows)


def test_arrays():
    dataset, partition = small_federation()
    data, hidden = federate(dataset, partition, seed=7)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((data, hidden)))
    np.testing.assert_array_equal(data.inputs, dataset.x_train)
    np.testing.assert_array_equal(data.test_inputs, dataset.x_test)
    np.testing.assert_array_equal(data.test_labels, dataset.y_test)
    np.testing.assert_array_equal(data.client_index, [[7, 2, 9], [0, 0, 0], [4, 0, 0], [0, 11, 0]])
    np.testing.assert_array_equal(data.client_size, [3, 0, 1, 2])
    np.testing.assert_array_equal(data.labelled_size, [0, 0, 0, 0])
    np.testing.assert_array_equal(data.server_index, [5, 1, 3])
    np.testing.assert_array_equal(hidden, dataset.y_train)
    is_anchor = np.isin(np.arange(12), [5, 1, 3])
    np.testing.assert_array_equal(data.visible_labels, np.where(is_anchor, dataset.y_train, -1))
    without = data._replace(client_size=jnp.array([3, 0, 1, 0]))  # row 0 is padding alone
    np.testing.assert_array_equal(np.flatnonzero(without.at_clients("", "")), [2, 4, 7, 9])
    assert data.inputs.dtype == data.test_inputs.dtype == jnp.uint8
    integers = data._replace(inputs=hidden, test_inputs=hidden, seed=hidden)
    assert {leaf.dtype for leaf in jax.tree.leaves(integers)} == {jnp.dtype("int32")}
    assert data.seed.dtype == jnp.uint32 and data.seed.shape == () and int(data.seed) == 7


def test_seeds_of_32_bits_have_keys_of_their_own():
    dataset, partition = small_federation()
    keys = {}
    for seed in (0, 2**31 - 1, 2**31, 2**32 - 1):
        data, _ = federate(dataset, partition, seed)
        assert int(data.seed) == seed
        keys[seed] = tuple(jax.random.key_data(init_key(data.seed)).tolist())
    assert len(set(keys.values())) == 4


def labelled_federation(labelled_rows, **arguments):
    dataset, partition = small_federation()
    partition = Partition(np.zeros(0, np.int32), partition.client_rows, np.array(labelled_rows, np.int32))
    return dataset, partition, federate(dataset, partition, 0, **arguments)[0]


@pytest.mark.parametrize("labelled, sizes", [([9, 0], [1, 0, 0, 1]), ([7, 2, 9], [3, 0, 0, 0])])
def test_labels_at_clients(labelled, sizes):
    """A part of some clients' examples, and all of one client's."""
    dataset, partition, data = labelled_federation(labelled)
    expected = np.full(12, -1)
    expected[labelled] = dataset.y_train[labelled]
    np.testing.assert_array_equal(data.visible_labels, expected)
    np.testing.assert_array_equal(data.labelled_size, sizes)
    given = np.bincount(dataset.y_train[labelled], minlength=3)
    np.testing.assert_array_equal(hold(dataset, partition, 0).given_labels, given)
    assert data.server_index.shape == (0,) and data.server_index.dtype == data.labelled_size.dtype == jnp.int32


@pytest.mark.parametrize("bound", ["reveal_labels", "centralised"])
@pytest.mark.parametrize("labelled", [[], [9, 0]])
def test_the_bounds_show_every_label_of_the_federation(bound, labelled):
    dataset, partition, data = labelled_federation(labelled, **{bound: True})
    owned = np.concatenate(partition.client_rows)
    np.testing.assert_array_equal(np.asarray(data.visible_labels)[owned], dataset.y_train[owned])
    np.testing.assert_array_equal(data.labelled_size, [3, 0, 1, 2])
    at_server = owned if bound == "centralised" else []
    np.testing.assert_array_equal(np.sort(data.server_index), np.sort(at_server))


def test_seeds_are_stacked_with_their_own_labels():
    federations = [labelled_federation(rows)[2] for rows in ([9, 0], [7, 2])]
    stacked = stack_seeds(federations)
    np.testing.assert_array_equal(stacked.labelled_size, [[1, 0, 0, 1], [2, 0, 0, 0]])
    assert stacked.server_index.shape == (2, 0) and stacked.inputs.shape == federations[0].inputs.shape


@pytest.mark.parametrize(
    ("place", "who"),
    [
        ({"server_index": np.array([6])}, "to the server"),
        ({"labelled_rows": np.array([7, 2])}, "as labelled to a client"),
        ({"validation_index": np.array([8, 6])}, "to the validation images"),
        ({"client_test_rows": (np.array([6]), *[np.array([], int)] * 3)}, "to a client's test images"),
    ],
)
def test_a_row_without_a_label_is_not_where_one_is_needed(place, who):
    dataset, partition = small_federation()
    dataset.y_train[[2, 6]] = -1
    with pytest.raises(UserError, match=rf"gives row [26], which has no label, {who}"):
        hold(dataset, partition._replace(**place), seed=0)
