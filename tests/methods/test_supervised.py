"""Supervised local training on visible labels, against SGD in NumPy."""

import numpy as np
import pytest

from fedjax_ssl.data import Dataset, Partition, federate
from fedjax_ssl.methods import METHODS
from tests.helpers.small_problem import federation, phases_of, prepare, sent_down, small_problem

A_FEW, NO_LABELS, ALL = range(3)


@pytest.fixture(scope="module")
def data():
    return federation([[0, -1, -1, 2, 1, -1, 0, -1, -1], [-1] * 4, [1, 2, 0]], at_server=[0, 1])


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
