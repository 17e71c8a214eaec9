"""SAGE: the share of each model's label, and the local epochs of its protocol."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import UserError
from fedjax_ssl.config import apply_arguments, base_config
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.sage import mixed_labels
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.run.validation import validate
from tests.helpers.runs import TINY_BACKBONE
from tests.helpers.small_problem import CLASSES, federation, phases_of, prepare, sent_down, small_problem

THRESHOLD, HALF_GAP = 0.6, 0.2
A_FEW, NO_LABELS, ONLY_LABELS, ONE = range(4)
PROTOCOL = {
    "consistency.unlabelled_ratio": 2,
    "consistency.include_labelled": True,
    "consistency.epoch_length": "unlabelled",
}


@pytest.fixture(scope="module")
def data():
    return federation([[0, -1, -1, 2, 1, -1, 0, -1, -1], [-1] * 7, [0, 1, 2, 0], [-1]])


def build(labels="clients", method="sage", **fields):
    fields = {"data.labels": labels, "confidence.threshold": THRESHOLD, "sage.half_gap": HALF_GAP, **fields}
    problem = small_problem(method, **fields)
    validate(problem.config)
    return problem, phases_of(METHODS[method].factory(problem))[0]


@functools.partial(jax.jit, static_argnames=("threshold", "half_gap"))
def mixed(local, received, threshold, half_gap):
    """The mixture of both models' labels, from their logits."""
    both = [jax.nn.softmax(logits) for logits in (local, received)]
    labels = [(jnp.argmax(p, axis=-1), (jnp.max(p, axis=-1) >= threshold).astype(jnp.float32)) for p in both]
    return mixed_labels(*both, *labels, half_gap=half_gap)


def confident(probability, label):
    """Logits whose softmax has this largest probability at this label, and the rest in equal parts: [1, C]."""
    p = np.full(CLASSES, (1 - probability) / (CLASSES - 1))
    p[label] = probability
    return np.log(p, dtype=np.float32)[None]


@pytest.mark.parametrize("local, received, share", [
    (0.99, 0.94, 0.5), (0.95, 1 - 1e-6, 0.5), (0.97, 0.97, 1), (0.96, 0.46, 2.0**-10), (0.94, 0.94, 0),
])  # fmt: skip
def test_the_local_label_has_half_the_weight_at_the_half_gap_and_all_of_it_without_a_gap(local, received, share):
    targets, counted = mixed(confident(local, 0), confident(received, 1), 0.9499, 0.05)  # 0.95 after rounding
    np.testing.assert_allclose(targets[0], [share, 1 - share, 0], atol=1e-3)
    assert counted[0] == (max(local, received) >= 0.95)


def test_the_unlabelled_deck_holds_the_labelled_images_too_and_an_epoch_goes_twice_through_it(data):
    _, phase = build(**PROTOCOL)
    problem, received = build()[0], sent_down(build()[0])
    jobs = [prepare(phase, received, data, client) for client in range(4)]
    assert [int(job.work.decks["unlabelled"].size) for job in jobs] == [9, 7, 4, 1]
    assert [int(job.work.decks["labelled"].size) for job in jobs] == [4, 0, 4, 0]
    # floor(n / 3) steps of 6 unlabelled images, two epochs; a client of one image takes a step an epoch.
    assert [int(job.num_steps) for job in jobs] == [6, 4, 2, 2]
    assert jobs[0].work.decks["unlabelled"].order.shape[0] == 2 * problem.config.client.epochs  # no order comes twice
    qualified = np.asarray(jobs[A_FEW].work.labels.report.qualified)
    assert np.all(qualified[[0, 3, 4, 6]]) and not qualified[9]


def test_every_data_set_can_be_normalised_by_cifar10_s_numbers(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "images.npz"
    images, labels = rng.integers(0, 256, (30, 2, 2, 3)).astype(np.uint8), np.arange(30) % CLASSES
    np.savez(path, x_train=images, y_train=labels, x_test=images[:6], y_test=labels[:6])
    config = apply_arguments(base_config(), "sage")
    config.update_from_flattened_dict({
        "data.source": "npz", "data.path": str(path), "data.labels": "clients", "data.normalisation": "cifar10",
        "model.name": TINY_BACKBONE, "num_clients": 2, "clients_per_round": 1,
    })  # fmt: skip
    assert build_experiment(config).problem.network.inputs.std == (0.2023, 0.1994, 0.2010)
    config.data.source, config.data.path = "digits", ""
    with pytest.raises(UserError, match=r"data.normalisation='cifar10' is for images of 3 channels"):
        build_experiment(config)


def test_labels_of_one_model_are_refused():
    with pytest.raises(UserError, match=r"labels_from='received' is for a method that labels by one model"):
        build(**{"confidence.labels_from": "received"})
