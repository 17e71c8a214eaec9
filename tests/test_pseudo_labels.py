"""Pseudo-labels against NumPy: by anchors, FedAnchor's equations 3 to 5; by the received model, SemiFL's equation 4."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import TINY_BACKBONE
from conftest import make_fedanchor_config as make_tiny_config
from fedjax_ssl.client.anchors import AnchorEmbeddings, all_pairs_scores, class_anchors, class_mean_scores
from fedjax_ssl.client.labels import score_cohort
from fedjax_ssl.client.local_sgd import GlobalModel
from fedjax_ssl.client.thresholds import qualify
from fedjax_ssl.engine.interface import Cohort
from fedjax_ssl.methods import semifl
from fedjax_ssl.run.experiment import build_experiment
from linear_network import LinearNetwork, in_numpy, probabilities

CLASSES, ABSENT = 5, 3


@pytest.fixture(scope="module")
def anchors_and_images():
    rng = np.random.default_rng(0)
    labels = rng.choice([c for c in range(CLASSES) if c != ABSENT], 23)
    anchors = rng.normal(size=(23, 16)).astype(np.float32) * rng.uniform(0.1, 10, (23, 1)).astype(np.float32)
    images = rng.normal(size=(40, 16)).astype(np.float32)
    images[7] = 0
    return AnchorEmbeddings(anchors, labels.astype(np.int32)), images


def scores_by_hand(anchors, images):
    """Eq. 3, similarity by similarity."""
    scores = np.full((len(images), CLASSES), -np.inf)
    for i, z in enumerate(images):
        for c in range(CLASSES):
            of_class = anchors.embeddings[anchors.labels == c]
            if len(of_class):
                length = np.linalg.norm(z)
                scores[i, c] = np.mean([z @ a / (length * np.linalg.norm(a)) if length else 0.0 for a in of_class])
    return scores


def test_both_forms_equal_the_equation(anchors_and_images):
    anchors, images = anchors_and_images
    expected = scores_by_hand(anchors, images)
    pairwise = np.asarray(all_pairs_scores(images, anchors, CLASSES))
    by_means = np.asarray(class_mean_scores(images, class_anchors(anchors, CLASSES)))
    np.testing.assert_allclose(pairwise, expected, atol=1e-6)
    np.testing.assert_allclose(by_means, expected, atol=1e-6)
    np.testing.assert_allclose(by_means, pairwise, atol=1e-6)
    assert np.all(by_means[:, ABSENT] == -np.inf)
    assert np.all(by_means[7, [c for c in range(CLASSES) if c != ABSENT]] == 0)


def test_labels_and_threshold(anchors_and_images):
    anchors, images = anchors_and_images
    expected = scores_by_hand(anchors, images)
    labels, qualified = qualify(class_mean_scores(images, class_anchors(anchors, CLASSES)), 0.1, strictly=True)
    np.testing.assert_array_equal(labels, expected.argmax(axis=1))
    np.testing.assert_array_equal(qualified, expected.max(axis=1) > 0.1)
    assert 0 < np.sum(qualified) < len(images)


def test_a_score_at_the_threshold():
    scores = np.array([[0.5, 0.25], [0.25, 0.75]], np.float32)
    np.testing.assert_array_equal(qualify(scores, 0.5, strictly=True)[1], [False, True])
    np.testing.assert_array_equal(qualify(scores, 0.5, strictly=False)[1], [True, True])


def test_an_embedding_equal_to_every_anchor_of_a_class_scores_one():
    anchors = AnchorEmbeddings(
        np.array([[2.0, 0.0], [5.0, 0.0], [0.0, 1.0]], np.float32), np.array([0, 0, 1], np.int32)
    )
    scores = class_mean_scores(np.array([[3.0, 0.0]], np.float32), class_anchors(anchors, 2))
    np.testing.assert_allclose(scores, [[1.0, 0.0]], atol=1e-7)


@pytest.fixture(scope="module")
def label_cohort():
    """(experiment, label): label(broadcast, clients) gives SemiFL's report with two views, and the scores behind it."""
    fields = {"method": "semifl", "model.name": TINY_BACKBONE, "semifl.label_views": 2, "semifl.threshold": 0.5}
    experiment, scores = build_experiment(make_tiny_config(**fields)), []

    def recorded(*args, **options):
        scores.append(score_cohort(*args, **options))
        return scores[-1]

    @jax.jit
    def label(broadcast, clients):
        phase = semifl.semifl(experiment.problem._replace(network=LinearNetwork(64, 10))).phases[0]
        cohort = Cohort(clients, {}, jax.random.key(5))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(semifl, "score_cohort", recorded)
            report = phase.prepare(broadcast, experiment.data, cohort, None).report
        return report.pseudo_labels["classification_head"], report.qualified, scores.pop()

    return experiment, label


def test_a_cohort_s_labels_are_those_of_the_mean_over_views(label_cohort):
    """Eq. 4 with two weak views, of nine possible crops each: every score is the mean of one pair's probabilities."""
    experiment, label = label_cohort
    params, _ = LinearNetwork(64, 10).init(jax.random.key(1))
    centre = np.random.default_rng(2).uniform(0, 0.6, 64).astype(np.float32)
    clients = np.array([6, 1, 3])
    labels, qualified, scores = map(np.asarray, label(GlobalModel(params, centre, 0.0), clients))
    pairs = list(itertools.combinations_with_replacement(range(9), 2))
    drawn, expected = [], np.zeros_like(scores)
    for job, client in enumerate(clients):
        images = np.asarray(experiment.data.images)[np.asarray(experiment.data.client_index[client])][..., 0]
        for place, image in enumerate(images):
            padded = np.pad(image / 255.0, 1, mode="reflect")
            crops = [padded[top : top + 8, left : left + 8].ravel() for top in range(3) for left in range(3)]
            p = probabilities(in_numpy(params), np.array(crops), centre)
            means = np.array([(p[a] + p[b]) / 2 for a, b in pairs])
            nearest = np.abs(means - scores[job, place]).max(axis=1).argmin()
            drawn.append(pairs[nearest])
            expected[job, place] = means[nearest]
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert len(set(drawn)) > 20 and sum(a != b for a, b in drawn) > 60  # 41 of 45 and 88 of 99 are to be expected
    np.testing.assert_array_equal(labels, expected.argmax(axis=2))
    np.testing.assert_array_equal(qualified, expected.max(axis=2) >= 0.5)
    assert 0 < qualified.sum() < qualified.size
    # What a client draws does not depend on who else is in the cohort.
    np.testing.assert_allclose(
        label(GlobalModel(params, centre, 0.0), clients[[2, 0, 1]])[2], scores[[2, 0, 1]], atol=1e-6
    )


def test_a_probability_at_semifl_s_threshold_counts(label_cohort):
    _, label = label_cohort
    two_classes = jnp.float32([0, 0] + 8 * [-1e9])  # probabilities of exactly 1/2, whatever the image
    params = {"backbone": {"bias": two_classes}, "classifier": {"kernel": jnp.zeros((64, 10))}}
    _, qualified, scores = label(GlobalModel(params, np.zeros(64, np.float32), 0.0), np.array([6, 1, 3]))
    assert np.all(np.asarray(scores)[..., :2] == 0.5) and np.all(qualified)
