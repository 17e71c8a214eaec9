"""The scores of pseudo-labels, by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.data.unknown import UNKNOWN
from fedjax_ssl.engine import evaluation
from fedjax_ssl.engine.evaluation import make_snapshot, score_pseudo_labels
from fedjax_ssl.engine.interface import Report
from fedjax_ssl.models import Outputs


def test_images_without_a_label_of_any_kind_are_not_scored():
    """Of four unlabelled images two have got a label, and one of these is right."""
    made = jnp.array([[True, True, False, False, True]])
    report = Report(jnp.array([[0, 1, 2, 2, 0]]), jnp.array([[True, False, False, False, True]]), made=made)
    truth, unlabelled = jnp.array([[0, 2, 2, 2, 1]]), jnp.array([[True] * 4 + [False]])
    scored = score_pseudo_labels(report, truth, unlabelled, 1)
    assert (scored["pseudo_label_accuracy"], scored["qualified_share"]) == (0.5, 0.5)
    assert scored["qualified_per_client"] == scored["qualified_accuracy"] == 1
    assert score_pseudo_labels(report._replace(made=None), truth, unlabelled, 1)["pseudo_label_accuracy"] == 0.75


def test_scores_by_hand():
    labels = jnp.array([[0, 1, 2], [2, 2, 0]])
    facts = {"score_gap": jnp.array([[0.5, 0.1, jnp.inf], [7.0, 0.3, 0.2]])}  # no second class has a score: no gap
    report = Report(labels, jnp.array([[True, True, False], [True, False, True]]), {"other": 2 - labels}, facts)
    truth = jnp.array([[0, 2, 2], [2, 1, 0]])
    unlabelled = jnp.array([[True, True, True], [False, True, True]])
    found = score_pseudo_labels(report, truth, unlabelled, num_jobs=2)
    expected = {
        "pseudo_label_accuracy": 3 / 5,
        "pseudo_label_accuracy_other": 0 / 5,
        "qualified_accuracy": 2 / 3,
        "qualified_per_client": 3 / 2,
        "qualified_share": 3 / 5,
        "score_gap": (0.5 + 0.1 + 0.3 + 0.2) / 4,
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6)
    nothing = score_pseudo_labels(report, truth, jnp.zeros((2, 3), bool), num_jobs=2)
    assert nothing["qualified_share"] == 0 and np.isnan(nothing["qualified_accuracy"])


def test_labels_of_unknown_images_are_wrong():
    """Of five unlabelled images three are unknown, of which clients train on two; of another nobody knows the class."""
    truth = jnp.array([[1, UNKNOWN, UNKNOWN, UNKNOWN, -1, UNKNOWN]])
    report = Report(jnp.array([[1, 0, 1, 2, 1, 0]]), jnp.array([[True, True, True, False, True, True]]))
    found = score_pseudo_labels(report, truth, jnp.array([[True] * 5 + [False]]), 1, with_unknown=True)
    assert (found["pseudo_label_accuracy"], found["qualified_share"]) == (1 / 4, 4 / 5)
    np.testing.assert_allclose([found["qualified_accuracy"], found["qualified_unknown_share"]], [1 / 3, 2 / 3])
    assert "qualified_unknown_share" not in score_pseudo_labels(report, truth, truth < 2, 1)


class OnePixel:
    """Logits -x and x of a pixel, whose embedding is the pixel."""

    def predict(self, model, images):
        x = images[:, 0, 0, 0]
        return Outputs(jnp.stack([-x, x], axis=1), {}, x[:, None])

    def embeddings(self, outputs):
        return outputs.features


def test_a_snapshot_shows_images_from_the_whole_set(monkeypatch):
    """Three of seven; its loss and its predictions are of all."""
    monkeypatch.setattr(evaluation, "NUM_EMBEDDINGS", 3)
    x, labels = np.array([0.5, 2, -1, 3, 0.1, -4, 1]), np.array([0, 1, 1, 0, 1, 0, 1])
    found = make_snapshot(OnePixel(), 4)(None, jnp.float32(x).reshape(7, 1, 1, 1), jnp.array(labels))
    np.testing.assert_array_equal(found["predictions"], x > 0)
    np.testing.assert_array_equal(found["labels"], labels)
    np.testing.assert_allclose(found["embeddings"][:, 0], x[[0, 3, 6]])
    np.testing.assert_array_equal(found["embedding_labels"], labels[[0, 3, 6]])
    right = np.exp(np.where(labels, x, -x)) / (np.exp(x) + np.exp(-x))
    assert found["loss"] == pytest.approx(-np.mean(np.log(right)), rel=1e-5)
