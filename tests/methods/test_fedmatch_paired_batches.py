"""Batches of unlabelled images beside those of labelled ones: their number, their size, their order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.client import Deck, Examples
from fedjax_ssl.engine.interface import Broadcast, Cohort
from fedjax_ssl.methods.fedmatch.paired_batches import cut, largest_batch
from fedjax_ssl.methods.fedmatch.phases import PLATEAU, PSI, SIGMA, fresh_plateau
from fedjax_ssl.ops.sgd import Model
from tests.helpers import toy_federation
from tests.helpers.fedmatch_by_hand import KEY, build, random_params
from tests.helpers.small_problem import federation, phases_of, small_problem


@pytest.mark.parametrize(("labelled", "unlabelled", "steps", "size"), [
    (3, 7, 2, 4),  # 1.5 labelled batches of 2 are two; so are the unlabelled images
    (5, 5, 2, 3),  # 2.5 are two as well
    (0, 10, 1, 10),
    (4, 0, 2, 0),
    (0, 0, 0, 0),  # takes no part
])  # fmt: skip
def test_an_epoch_has_as_many_batches_of_both_kinds(labelled, unlabelled, steps, size):
    problem, method = build("clients")
    problem.config.data.partition_file = "saved.npz"  # who has how many labels is not said
    data = federation([[1] * labelled + [-1] * unlabelled])
    job = prepared(problem, method, data, KEY)
    assert job.num_steps == 2 * steps  # epochs
    assert steps == 0 or job.work[0].work.size == size


def prepared(problem, method, data, key):
    """The job of client 0."""
    params = {SIGMA: random_params(problem, 4), PSI: random_params(problem, 5)}
    model = Model(params, problem.network.init(KEY).batch_stats)
    cohort = Cohort(jnp.array([0]), {PLATEAU: fresh_plateau((1,))}, key, personal={"entries": jnp.zeros(1)})
    received = Broadcast(model, jnp.float32(0.1), jnp.bool_(False))
    return jax.tree.map(lambda leaf: leaf[0], phases_of(method)[0].prepare(received, data, cohort, None))


@pytest.mark.parametrize(("expected", "fields"), [
    (1125, {"data.num_labelled": 5000, "data.partition": "dirichlet_pairs", "client.batch_size": 128}),  # SAGE's
    (225, {"data.labels_per_class": 25, "data.partition": "stratified", "client.batch_size": 25}),
    # A client of 477 images, 95 of them labelled, has 1.48 batches of 64: its 382 others are one batch.
    (382, {"data.labelled_share": 0.2, "client.batch_size": 64}),
    (382, {"data.labels": "profile", "data.label_profile": (0.2, *(1.0,) * 19), "client.batch_size": 64}),
    (2500, {"data.labels": "profile", "data.label_profile": ("beta(9,1)",)}),  # any share may be drawn
    # Its own test images may be some of the 25 of a class.
    (2500, {"data.labels_per_class": 25, "data.partition": "stratified", "data.client_test_share": 0.2}),
    (2500, {"data.labels_per_class": 5, "client.batch_size": 10}),  # a client may have no labelled image
    (2500, {"data.labelled_share": 0.2, "data.partition_file": "saved.npz"}),
    (1, {"data.reveal_labels": True}),
])  # fmt: skip
def test_the_largest_batch_is_that_of_the_client_with_the_fewest_labels_beside_it(expected, fields):
    problem = small_problem("fedmatch", **{"data.labels": "clients", "num_clients": 20, **fields})
    problem = problem._replace(num_classes=10)
    assert largest_batch(problem, 2500) == expected
    assert largest_batch(problem._replace(lacks_labels=True), 2500) == 2500  # the data say who has labels


@pytest.mark.parametrize(("batches", "size", "room", "lengths"), [
    (2, 3, 4, [3, 2]),  # batches smaller than their room
    (2, 2, 2, [2, 2]),  # one example has no step
    (4, 2, 3, [2, 2, 1, 0]),  # more batches than examples
])  # fmt: skip
def test_a_deck_may_be_cut_otherwise(batches, size, room, lengths):
    client = np.array([8, 2, 6, 9, 1])
    examples = Examples.of(toy_federation.federation([client]), Cohort(jnp.array([0]), {}, jax.random.key(4)))
    decks = Deck.shuffled(examples, examples.present, examples.keys, 3)
    deck = jax.tree.map(lambda leaf: leaf[0], decks)
    found_at = jax.jit(lambda index: cut(deck, index, jnp.int32(batches), jnp.int32(size), room))
    for epoch in range(3):
        order = np.asarray(deck.order[epoch][: deck.size])
        for number, length in enumerate(lengths):
            found = found_at(epoch * batches + number)
            assert found.rows.shape == (room,) and found.epoch == epoch
            assert found.mask.sum() == length and np.all(found.mask[:length])
            expected = order[number * size : number * size + length]
            np.testing.assert_array_equal(found.positions[:length], expected)
            np.testing.assert_array_equal(found.rows[:length], client[expected])
