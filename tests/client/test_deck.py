"""The order in which local epochs go through a client's examples, batch by batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.client import Deck, Examples
from fedjax_ssl.engine.interface import Cohort
from tests.helpers.toy_federation import federation

EPOCHS, B = 3, 2
CLIENTS = [[8, 2, 6, 9, 1], [], [7, 3]]
VISIBLE = {2: 1, 1: 0, 5: 1}


@pytest.fixture(scope="module")
def examples():
    cohort = Cohort(jnp.array([2, 0, 1]), {}, jax.random.key(4))
    return jax.jit(Examples.of)(federation(CLIENTS, VISIBLE), cohort)


def test_examples(examples):
    """The clients' rows; what is beyond a client's size is neither labelled nor unlabelled."""
    for job, client in enumerate((2, 0, 1)):
        rows, size = CLIENTS[client], len(CLIENTS[client])
        np.testing.assert_array_equal(examples.rows[job, :size], rows)
        np.testing.assert_array_equal(examples.present[job], np.arange(5) < size)
        np.testing.assert_array_equal(examples.labels[job], [VISIBLE.get(row, -1) for row in rows] + [-1] * (5 - size))
        given = np.array([row in VISIBLE for row in rows] + [False] * (5 - size))
        np.testing.assert_array_equal(examples.labelled[job], given)
        np.testing.assert_array_equal(examples.unlabelled[job], ~given & (np.arange(5) < size))


@jax.jit
def shuffled(examples, included):
    decks = Deck.shuffled(examples, included, examples.keys, EPOCHS)
    return decks, decks.num_steps(B)


def deck_of(examples, included, job):
    """The deck of one job, and its number of steps."""
    decks, steps = jax.device_get(shuffled(examples, included))
    return jax.device_put(jax.tree.map(lambda leaf: leaf[job], decks)), int(steps[job])


@pytest.mark.parametrize("kind", ["present", "labelled", "unlabelled"])
def test_every_epoch_has_each_included_example_once(examples, kind):
    """Short last batches are masked; a batch says which epoch it is of."""
    included, job = getattr(examples, kind), 1
    deck, steps = deck_of(examples, included, job)
    expected = [row for row, chosen in zip(CLIENTS[0], np.asarray(included[job])) if chosen]
    per_epoch = -(-len(expected) // B)
    assert steps == EPOCHS * per_epoch and deck.size == len(expected)
    batch, orders = jax.jit(lambda index: deck.batch(index, B)), []
    for epoch in range(EPOCHS):
        rows = []
        for number in range(per_epoch):
            found = batch(epoch * per_epoch + number)
            mask = np.asarray(found.mask)
            assert found.epoch == epoch
            assert mask.sum() == min(B, len(expected) - number * B)
            np.testing.assert_array_equal(np.array(CLIENTS[0])[found.positions[mask]], found.rows[mask])
            rows += found.rows[mask].tolist()
        assert sorted(rows) == sorted(expected)
        orders.append(tuple(rows))
    assert kind == "labelled" or len(set(orders)) > 1
    # Beyond the last epoch the deck is gone through again, from the first.
    for number in range(per_epoch):
        again, first = batch(steps + number), batch(number)
        np.testing.assert_array_equal(again.rows, first.rows)
        np.testing.assert_array_equal(again.mask, first.mask)
        assert again.epoch == EPOCHS


def test_padding_has_examples_of_the_deck(examples):
    """Views of tables take values from other rows of a batch: those of row 0 of the table are not the client's."""
    for included, job, own in ((examples.present, 0, {7, 3}), (examples.labelled, 1, {2, 1})):
        deck, _ = deck_of(examples, included, job)
        found = deck.batch(jnp.int32(0), 5)
        assert found.mask.tolist() == [True] * 2 + [False] * 3 and set(found.rows.tolist()) == own
        assert found.rows[2:].tolist() == [*found.rows[:2].tolist(), int(found.rows[0])]


def test_an_empty_deck_has_no_step_and_only_padding(examples):
    for included, job in ((examples.present, 2), (examples.labelled, 0)):
        deck, steps = deck_of(examples, included, job)
        assert steps == 0 and deck.size == 0 and not np.any(deck.batch(jnp.int32(3), B).mask)


def test_an_order_is_of_the_clients_key(examples):
    """Not of its place in the cohort; with another key it is another."""
    cohort = Cohort(jnp.array([0]), {}, jax.random.key(4))
    alone = jax.jit(Examples.of)(federation(CLIENTS, VISIBLE), cohort)
    here, there = deck_of(examples, examples.present, 1)[0], deck_of(alone, alone.present, 0)[0]
    np.testing.assert_array_equal(here.order, there.order)
    other = alone._replace(keys=jax.vmap(lambda key: jax.random.fold_in(key, 1))(alone.keys))
    assert np.any(np.asarray(deck_of(other, other.present, 0)[0].order) != np.asarray(here.order))
