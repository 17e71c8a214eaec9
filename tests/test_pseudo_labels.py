"""Pseudo-labels by anchors against NumPy written from FedAnchor's equations 3 to 5."""

import numpy as np
import pytest

from fedjax_ssl.pseudo_labels import (
    AnchorEmbeddings,
    all_pairs_scores,
    class_anchors,
    class_mean_scores,
)
from fedjax_ssl.thresholds import qualify

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
