"""Supervised local training on visible labels, against SGD in NumPy."""

import numpy as np
import pytest

from fedjax_ssl.data import Dataset, Partition, federate
from fedjax_ssl.methods import METHODS
from tests.helpers.consistency_by_hand import batches
from tests.helpers.linear_network import at_rest, in_numpy, sgd_step
from tests.helpers.small_problem import (
    CLASSES,
    assert_model,
    federation,
    loss_and_gradient,
    mirrored,
    phases_of,
    pixels_of,
    prepare,
    running_mean,
    sent_down,
    small_problem,
    statistics_of,
    train,
)

A_FEW, NO_LABELS, ALL = range(3)


@pytest.fixture(scope="module")
def data():
    return federation([[0, -1, -1, 2, 1, -1, 0, -1, -1], [-1] * 4, [1, 2, 0]], at_server=[0, 1])


@pytest.mark.parametrize("proximal", [0.0, 0.5])
def test_the_epochs_of_a_client_are_sgd_on_its_visible_labels(data, proximal):
    """With FedProx's mu the gradient has mu (w - w_t) besides, clipped with the rest."""
    problem = small_problem("supervised", **{"client.proximal": proximal})
    received, config = sent_down(problem), problem.config.client
    job, finished = train(phases_of(METHODS["supervised"].factory(problem))[0], received, data, A_FEW)
    assert job.num_steps == 4  # two epochs of the four labelled images, in batches of three and of one

    first = in_numpy(received.model.params)
    model, velocity, statistics, losses = dict(first), at_rest(first), statistics_of(received.model), []
    rows, order = np.asarray(data.client_index[A_FEW]), np.asarray(job.work.decks["labelled"].order)
    for batch in batches(order, 4, 3):
        x = pixels_of(data, rows[batch], mirrored)
        targets = np.eye(CLASSES)[np.asarray(data.visible_labels)[rows[batch]]] / len(batch)
        loss, gradient = loss_and_gradient(model, x, x.mean(axis=0), targets)
        gradient = {name: leaf + proximal * (model[name] - first[name]) for name, leaf in gradient.items()}
        model, velocity = sgd_step(model, gradient, velocity, config, config.learning_rate)
        statistics = running_mean(statistics, x)
        losses.append(loss)
    assert_model(finished.upload.model, model, statistics)
    np.testing.assert_allclose(finished.metrics["client_loss"], np.mean(losses), rtol=1e-5)
    for epoch in order:
        assert set(epoch[:4]) == {0, 3, 4, 6}


def test_who_has_no_label_takes_no_part(data):
    problem = small_problem("supervised")
    phase, received = phases_of(METHODS["supervised"].factory(problem))[0], sent_down(problem)
    jobs = [prepare(phase, received, data, client) for client in (A_FEW, NO_LABELS, ALL)]
    assert [int(job.num_steps) for job in jobs] == [4, 0, 2]
    assert all(job.takes_part is None for job in jobs)  # whoever has a step


@pytest.mark.parametrize("variant, steps", [("", [0, 2, 0]), (",all_labels", [4, 2, 2])])
def test_the_variant_all_labels_trains_on_every_image(variant, steps):
    problem = small_problem(f"supervised{variant}")
    labels, none = np.arange(12) % 3, np.zeros(0, np.int32)
    images = np.zeros((12, 2, 2, 1), np.uint8)
    dataset = Dataset("", images, labels, images[:2], labels[:2], num_classes=3, mean=(0.0,), std=(1.0,), flip=False)
    partition = Partition(none, [np.arange(5), np.arange(5, 8), np.arange(8, 11)], np.array([5, 7]))
    data, _ = federate(dataset, partition, seed=0, reveal_labels=problem.config.data.reveal_labels)
    phase, received = phases_of(METHODS["supervised"].factory(problem))[0], sent_down(problem)
    assert [int(prepare(phase, received, data, client).num_steps) for client in range(3)] == steps
