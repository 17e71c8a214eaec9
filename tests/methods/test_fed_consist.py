"""Fed-Consist's consistency of two views at a client without labels, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.methods import METHODS
from tests.helpers.consistency_by_hand import batches
from tests.helpers.linear_network import at_rest, in_numpy, sgd_step
from tests.helpers.small_problem import (
    assert_model,
    federation,
    handed_on,
    phases_of,
    pixels_of,
    probabilities,
    running_mean,
    sent_down,
    small_problem,
    statistics_of,
    train,
)

WEIGHT, UNLABELLED = 0.7, 1


def shifted(key, images):
    """A view that rolls the rows, or does not."""
    return jnp.where(jax.random.bernoulli(key), jnp.roll(images, 1, axis=1), images)


def test_both_views_get_the_same_prediction():
    """Seven images in batches of 3, so that the last one is short; the second view is a target without gradient."""
    data = federation([[0, 1, 2], [-1] * 7])
    problem = small_problem(
        "fed_consist", weak=shifted, **{"fed_consist.consistency_weight": WEIGHT, "fed_consist.warm_up_rounds": 0}
    )
    labelled, unlabelled = phases_of(METHODS["fed_consist"].factory(problem))
    received = sent_down(problem)
    job, finished = train(labelled, received, data, UNLABELLED)
    job, finished = train(unlabelled, received, data, UNLABELLED, previous=handed_on(job, finished))

    config, deck = problem.config.client, job.work.decks["unlabelled"]
    model, statistics, losses, differ = in_numpy(received.model.params), statistics_of(received.model), [], 0
    velocity = at_rest(model)
    for step, batch in enumerate(batches(np.asarray(deck.order), int(deck.size), config.batch_size)):
        rows = np.asarray(deck.rows)[batch]
        keys = jax.random.split(jax.random.key(step))
        x, other = (pixels_of(data, rows, lambda _, images, key=key: shifted(key, images)) for key in keys)
        differ += not np.array_equal(x, other)
        p, target = probabilities(model, x, x.mean(axis=0)), probabilities(model, other, other.mean(axis=0))
        losses.append(WEIGHT * np.mean(np.sum((p - target) ** 2, axis=1)))
        of_logits = 2 * WEIGHT / len(x) * p * (p - target - np.sum((p - target) * p, axis=1, keepdims=True))
        gradient = {"bias": of_logits.sum(axis=0), "kernel": (x - x.mean(axis=0)).T @ of_logits}
        model, velocity = sgd_step(model, gradient, velocity, config, config.learning_rate)
        statistics = running_mean(statistics, x, other)
    assert len(losses) == 6 == job.num_steps and differ > 0
    assert_model(finished.upload.model, model, statistics)
    np.testing.assert_allclose(finished.metrics["unlabelled_loss"], np.mean(losses), rtol=1e-4)
    assert finished.upload.metadata["labelled"] == 0
