"""imFed-Semi's sub-banks, banks and sub-bank classification, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.engine.interface import Cohort
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.imfed_semi import divided, drawn_proportions
from tests.helpers.consistency_by_hand import batches
from tests.helpers.linear_network import at_rest, in_numpy, sgd_step
from tests.helpers.small_problem import (
    CLASSES,
    assert_model,
    federation,
    mirrored,
    phases_of,
    pixels_of,
    probabilities,
    sent_down,
    small_problem,
    statistics_of,
    train,
)

CLIENT, LOW, HIGH = 0, 0.5, 0.7
FIELDS = {"imfed_semi.confident": LOW, "imfed_semi.very_confident": HIGH, "client.persistent": False}


def sub_banks_of(labels, wanted):
    """Class by class, sub-bank by sub-bank: as many images as wanted, in their order; the last one takes the rest."""
    present = [label for label in labels if label >= 0]
    found = np.full(len(labels), len(wanted) - 1)
    for c in range(wanted.shape[1]):
        left = [place for place, label in enumerate(labels) if label == c]
        for bank in range(len(wanted) - 1):
            number = int(len(present) // len(wanted) * wanted[bank, c])
            found[left[:number]] = bank
            left = left[number:]
    return found


def test_images_are_divided_by_their_class():
    """Two clients with 40 and 23 images, of which some have no class."""
    rng, wanted = np.random.default_rng(0), np.stack([drawn_proportions(jnp.int32(3), c, 4) for c in range(2)])
    labels = rng.integers(-1, 4, (2, 40))
    labels[1, 23:] = -1
    found = np.asarray(divided(jax.nn.one_hot(labels, 4), jnp.asarray(wanted)))
    for client in range(2):
        some = labels[client] >= 0
        np.testing.assert_array_equal(found[client][some], sub_banks_of(labels[client], wanted[client])[some])
        assert set(found[client][some]) == {0, 1, 2, 3}


def test_wanted_proportions_are_a_client_s_own_and_stay():
    first, again, other = (np.asarray(drawn_proportions(jnp.int32(0), client, 5)) for client in (1, 1, 2))
    np.testing.assert_allclose(first.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_array_equal(first, again)
    assert np.all(first != other) and first.min() > 0.1 / (5 + 1)


def banks_by_hand(data, received, lasting):
    """Labels, which images are confident now, the bank, sub-banks, Pi and rho of the client."""
    rows = np.asarray(data.client_index)[CLIENT, : int(data.client_size[CLIENT])]
    x = pixels_of(data, rows, mirrored)
    p = probabilities(in_numpy(received.model.params), x, statistics_of(received.model))
    best, labels = p.max(axis=1), p.argmax(axis=1)
    lasting = lasting | (best > HIGH)
    sub_banks = sub_banks_of(labels, np.asarray(drawn_proportions(data.seed, CLIENT, CLASSES)))
    pi = np.zeros((CLASSES, CLASSES))
    for place in np.flatnonzero((best > LOW) | lasting):
        pi[sub_banks[place], labels[place]] += 1
    rho = np.bincount(sub_banks, minlength=CLASSES) / len(rows)
    return labels, best > LOW, lasting, sub_banks, pi / np.maximum(pi.sum(axis=1, keepdims=True), 1), rho


def problem_and_data():
    return small_problem("imfed_semi", **FIELDS), federation([[-1] * 10], at_server=[0, 1, 2])


def test_banks_of_a_round():
    """An image that was very confident before stays in the bank, and counts in Pi."""
    problem, data = problem_and_data()
    method, received = METHODS["imfed_semi"].factory(problem), sent_down(problem)
    labels, now, lasting, sub_banks, pi, rho = banks_by_hand(data, received, np.zeros(10, bool))
    assert 0 < lasting.sum() < now.sum() < 10
    before = np.zeros(10, bool)
    before[np.flatnonzero(~now)[0]] = True
    labels, now, lasting, sub_banks, pi, rho = banks_by_hand(data, received, before)
    cohort = Cohort(jnp.array([CLIENT]), {"bank": jnp.asarray(before)[None]}, jax.random.key(0))
    made = jax.tree.map(lambda leaf: leaf[0], method.label(received, data, cohort, None))
    np.testing.assert_array_equal(made.report.labels, labels)
    np.testing.assert_array_equal(made.report.qualified, now)
    np.testing.assert_array_equal(made.own["bank"], lasting)
    for found, expected in zip(made.more, (sub_banks, pi, rho), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_client_classifies_sub_banks():
    """The gradient of -log(rho_s (Pi p)_s / sum_j rho_j (Pi p)_j) by the chain rule; whole batches of 3 alone."""
    problem, data = problem_and_data()
    (phase,) = phases_of(METHODS["imfed_semi"].factory(problem))
    received = sent_down(problem)
    _, now, _, sub_banks, pi, rho = banks_by_hand(data, received, np.zeros(10, bool))
    job, finished = train(phase, received, data, CLIENT, {"bank": jnp.zeros(10, bool)}, jit=True)
    config, deck = problem.config.client, job.work.decks["unlabelled"]
    assert int(deck.size) == now.sum() // 3 * 3 > 0
    model, losses = in_numpy(received.model.params), []
    velocity = at_rest(model)
    for batch in batches(np.asarray(deck.order), int(deck.size), config.batch_size):
        assert now[batch].all()
        x = pixels_of(data, np.asarray(deck.rows)[batch], mirrored)
        x = x - x.mean(axis=0)
        p = probabilities(model, x, 0)
        mixed, own = rho * (p @ pi.T), sub_banks[batch]
        places = np.arange(len(x))
        losses.append(np.mean(np.log(mixed.sum(axis=1)) - np.log(mixed[places, own])))
        of_p = (rho @ pi)[None] / mixed.sum(axis=1, keepdims=True) - (rho[:, None] * pi)[own] / mixed[places, own, None]
        of_logits = p * (of_p - np.sum(of_p * p, axis=1, keepdims=True)) / len(x)
        gradient = {"bias": of_logits.sum(axis=0), "kernel": x.T @ of_logits}
        model, velocity = sgd_step(model, gradient, velocity, config, config.learning_rate)
    assert_model(finished.upload.model, model)
    np.testing.assert_allclose(finished.metrics["unlabelled_loss"], np.mean(losses), rtol=1e-4)
