"""Measures for imbalanced sets against scikit-learn and plain loops, and in the records of a run."""

import functools
import json
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics

from fedjax_ssl import UserError, base_config, load, train
from fedjax_ssl.data import load_dataset
from fedjax_ssl.engine.measures import (
    MEASURES,
    confusion_matrix,
    count_training_images,
    knn_accuracy,
    macro_auc,
    measure,
    measure_outputs,
    open_set,
    words_of,
)
from fedjax_ssl.records.runs import read_run
from fedjax_ssl.report import write_report
from fedjax_ssl.report.table import Row, make_table
from fedjax_ssl.run.observe.trackers import curves
from fedjax_ssl.run.validation import validate
from tests.helpers.small_problem import federation
from tests.helpers.stub import make_stub_config

ALL = tuple(MEASURES)


NUM_IMAGES = 500  # in nearly all tests, which share one program


def outputs(num_classes, seed, digits=None, drop=()):
    """Logits that know something, of imbalanced labels; rounded to so many digits, so that scores are equal."""
    rng = np.random.default_rng(seed)
    share = 0.6 ** np.arange(num_classes)
    share[list(drop)] = 0
    labels = rng.choice(num_classes, NUM_IMAGES, p=share / share.sum())
    logits = rng.normal(size=(NUM_IMAGES, num_classes)) + 1.5 * np.eye(num_classes)[labels]
    return (logits if digits is None else np.round(logits, digits)).astype(np.float32), labels


measure_all = jax.jit(functools.partial(measure, ALL))


def ours(logits, labels, counts=None):
    counts = np.full(logits.shape[1], 50) if counts is None else counts
    found = measure_all(logits, labels, jnp.asarray(counts))
    return {name: float(value) for name, value in found.items()}


@pytest.mark.parametrize(("num_classes", "digits"), [(7, None), (7, 0), (2, 0), (7, -3)])
def test_measures_are_scikit_learns(num_classes, digits):
    """Scores of all kinds: all different, many equal, all equal."""
    logits, labels = outputs(num_classes, seed=num_classes, digits=digits)
    found, predictions = ours(logits, labels), logits.argmax(axis=1)
    scores = np.asarray(jax.nn.softmax(logits))
    area = metrics.roc_auc_score(labels, scores[:, 1] if num_classes == 2 else scores, multi_class="ovr")
    assert found["auc"] == pytest.approx(area, abs=1e-6)
    assert found["balanced_accuracy"] == pytest.approx(metrics.balanced_accuracy_score(labels, predictions), abs=1e-6)
    precision = metrics.precision_score(labels, predictions, average="macro", zero_division=0)
    assert found["precision"] == pytest.approx(precision, abs=1e-6)


@pytest.mark.parametrize("num_classes", [2, 7])
def test_measures_of_outputs_are_those_of_plain_loops(num_classes):
    """Written from their definitions, without scikit-learn. Class 5 does not occur, but is predicted."""
    logits, labels = outputs(num_classes, seed=3, drop=(5,) if num_classes > 5 else ())
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    predictions, confidences = scores.argmax(axis=1), scores.max(axis=1)
    ranks = [sum(row > row[label]) for row, label in zip(scores, labels)]
    found = measure_outputs(labels, predictions, num_classes, confidences, np.array(ranks))
    f1, sensitivity, specificity = {}, {}, {}
    for c in range(num_classes):
        tp, fp = sum((predictions == c) & (labels == c)), sum((predictions == c) & (labels != c))
        fn, tn = sum((predictions != c) & (labels == c)), sum((predictions != c) & (labels != c))
        f1[c] = 2 * tp / (2 * tp + fp + fn)
        if tp + fn:
            sensitivity[c], specificity[c] = tp / (tp + fn), tn / (tn + fp)
    counted = (1,) if num_classes == 2 else tuple(sensitivity)
    agree = np.mean(labels == predictions)
    chance = sum(np.mean(labels == c) * np.mean(predictions == c) for c in range(num_classes))
    error = 0.0
    for low in range(15):
        inside = (confidences > low / 15) & (confidences <= (low + 1) / 15)
        if inside.any():
            error += inside.sum() * abs(np.mean((labels == predictions)[inside]) - confidences[inside].mean())
    expected = {
        "f1": np.mean(list(f1.values())),
        "sensitivity": np.mean([sensitivity[c] for c in counted]),
        "specificity": np.mean([specificity[c] for c in counted]),
        "kappa": (agree - chance) / (1 - chance),
        "calibration_error": error / len(labels),
        "top5_accuracy": np.mean(np.array(ranks) < 5),
    }
    assert found == pytest.approx(expected, abs=1e-6)


def test_classes_that_are_absent_or_never_predicted():
    """A class without images has no area and no recall; predicted all the same it counts among the precisions."""
    logits, labels = outputs(7, seed=0, drop=(2, 5))
    logits[:, 5] = -9  # neither in the set nor predicted
    logits[:, 4] = -9  # in the set, but not predicted
    predictions, found = logits.argmax(axis=1), ours(logits, labels)
    assert set(labels) == {0, 1, 3, 4, 6} and set(predictions) == {0, 1, 2, 3, 6}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = metrics.balanced_accuracy_score(labels, predictions)
    assert found["balanced_accuracy"] == pytest.approx(expected, abs=1e-6)
    precision = metrics.precision_score(labels, predictions, average="macro", zero_division=0)
    assert found["precision"] == pytest.approx(precision, abs=1e-6)
    scores = np.asarray(jax.nn.softmax(logits), np.float64)
    each = [metrics.roc_auc_score(labels == c, scores[:, c]) for c in (0, 1, 3, 4, 6)]
    assert found["auc"] == pytest.approx(np.mean(each), abs=1e-6)
    alone = ours(logits, np.zeros_like(labels))  # one class is no ranking
    assert np.isnan(alone["auc"]) and alone["balanced_accuracy"] == pytest.approx(np.mean(predictions == 0), abs=1e-6)


def test_area_of_many_images_is_exact():
    """Pairs of images are more than float32 and int32 can count."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 120_000)
    score = np.round(rng.normal(size=len(labels)) + labels, 3).astype(np.float32)
    found = jax.jit(macro_auc)(np.stack([-score, score], axis=1), labels)
    assert float(found) == pytest.approx(metrics.roc_auc_score(labels, score.astype(np.float64)), abs=1e-6)


def test_known_against_unknown_images():
    """The area is scikit-learn's, also of equal scores; open-set accuracy is that of a plain loop."""
    compiled = jax.jit(open_set)
    for digits in (None, 1, 0, -3):  # of few scores, and of one alone
        logits, labels = outputs(7, seed=11, digits=digits)
        unknown = outputs(7, seed=12, digits=digits)[0][:180] / 2
        found = compiled(logits, labels, unknown)
        known_scores, unknown_scores = (np.asarray(jax.nn.softmax(each)).max(axis=1) for each in (logits, unknown))
        area = metrics.roc_auc_score([1] * NUM_IMAGES + [0] * 180, np.concatenate([known_scores, unknown_scores]))
        assert float(found["auroc"]) == pytest.approx(area, abs=1e-6)
        thresholds = [t for t in sorted(set(known_scores)) if np.mean(known_scores >= t) >= 0.95]
        right = sum(known_scores[i] >= thresholds[-1] and logits[i].argmax() == labels[i] for i in range(NUM_IMAGES))
        expected = (right + sum(unknown_scores < thresholds[-1])) / (NUM_IMAGES + 180)
        assert float(found["open_accuracy"]) == pytest.approx(expected, abs=1e-6)
    assert area == 0.5  # all scores are equal


def test_shots_by_a_plain_loop():
    logits, labels = outputs(7, seed=3)
    counts, predictions = np.array([500, 101, 100, 20, 19, 0, 40]), logits.argmax(axis=1)
    found = ours(logits, labels, counts)
    of_class = [np.mean(predictions[labels == c] == c) for c in range(7)]
    for name, classes in {"many": [0, 1], "medium": [2, 3, 6], "few": [4, 5]}.items():
        assert found[f"{name}_accuracy"] == pytest.approx(np.mean([of_class[c] for c in classes]), abs=1e-6)
    assert np.isnan(ours(logits, labels, np.full(7, 20))["few_accuracy"])  # no class has so few
    matrix = np.asarray(confusion_matrix(labels, predictions, 7))
    np.testing.assert_array_equal(matrix, metrics.confusion_matrix(labels, predictions, labels=range(7)))


def test_training_images_are_counted_once():
    """Padding is nobody's, and an image that client and server hold (a centralised bound) is one."""
    data = federation([[0, 2, 2], [1], []], at_server=[1, 1])
    truth = jnp.where(data.visible_labels < 0, 0, data.visible_labels)
    assert count_training_images(data, truth, 3).tolist() == [1, 3, 2]
    twice = data._replace(server_index=jnp.concatenate([data.server_index, data.client_index[0, :3]]))
    assert count_training_images(twice, truth, 3).tolist() == [1, 3, 2]
    without = data._replace(server_index=jnp.zeros((0,), jnp.int32))
    assert count_training_images(without, truth, 3).tolist() == [1, 1, 2]


def knn_by_hand(features, known, known_labels, neighbours, num_classes):
    """Image by image and neighbour by neighbour."""
    found = []
    for one in features:
        cosines = np.array([one @ other / np.linalg.norm(one) / np.linalg.norm(other) for other in known])
        votes = np.zeros(num_classes)
        for place in np.argsort(-cosines)[:neighbours]:
            votes[known_labels[place]] += np.exp(cosines[place] / 0.1)
        found.append(votes.argmax())
    return np.array(found)


@pytest.mark.parametrize("neighbours", [1, 7, 200])
def test_knn_accuracy_is_that_of_a_plain_loop(neighbours):
    """The nearest alone, some, and more than there are, which is all."""
    rng = np.random.default_rng(neighbours)
    centres = rng.normal(size=(4, 6))
    known_labels, labels = rng.integers(0, 4, 30), rng.integers(0, 4, 80)
    known, features = (
        (centres[each] + 1.5 * rng.normal(size=(len(each), 6))).astype(np.float32) for each in (known_labels, labels)
    )
    expected = np.mean(knn_by_hand(features, known, known_labels, neighbours, 4) == labels)
    ours = jax.jit(knn_accuracy, static_argnums=(4, 5))(features, labels, known, known_labels, 4, neighbours)
    assert float(ours) == pytest.approx(expected, abs=1e-6) and 0.3 < expected < 1


def test_knn_needs_labels_at_the_server():
    config = base_config()
    config.update_from_flattened_dict({"method": "fixmatch", "data.labels": "clients", "eval_measures": ("knn",)})
    with pytest.raises(UserError, match="eval_measures has 'knn', which needs labelled images at the server"):
        validate(config)


@pytest.fixture(scope="module")
def measured_run(tmp_path_factory):
    """A run on long-tailed digits that measures all there is, on validation images, and the test set at its end."""
    workdir = tmp_path_factory.mktemp("measured") / "run"
    fields = {"eval_measures": ALL, "data.validation": 200, "data.imbalance": 10.0}
    fields |= {"data.server_labels": 20, "data.examples_per_client": 0, "data.labels": "server", "num_rounds": 2}
    train(make_stub_config(**fields), workdir)
    return workdir


@pytest.mark.test_all
def test_a_run_records_and_shows_its_measures(measured_run):
    """One figure of each kind is scikit-learn's of the trained model, on both sets; training images are long-tailed."""
    run, config = read_run(measured_run), make_stub_config()
    digits = load_dataset(config.data)
    counts = run.class_counts()
    held = counts["clients"].sum(axis=0) + counts["server"]
    assert held[0] > 100 and held[-1] < 20 and (np.diff(held) < 0).all()
    partition = np.load(measured_run / "partition.npz")
    rows = partition["validation_index"]
    sets = {"validation": (digits.x_train[rows], digits.y_train[rows]), "test": (digits.x_test, digits.y_test)}
    predict = load(measured_run, allow_code=True)
    summary = json.loads((measured_run / "summary.json").read_text())
    for name, (images, labels) in sets.items():
        scores = predict(images).probabilities.astype(np.float64)
        predictions = scores.argmax(axis=1)
        recall = metrics.recall_score(labels, predictions, average=None)
        expected = {
            "precision": metrics.precision_score(labels, predictions, average="macro", zero_division=0),
            "auc": np.mean([metrics.roc_auc_score(labels == c, scores[:, c]) for c in range(10)]),
            "many_accuracy": recall[held > 100].mean(),
            "few_accuracy": recall[held < 20].mean(),
        }
        if name == "test":  # once, of the last model
            expected["f1"] = metrics.f1_score(labels, predictions, average="macro")
            assert {f"test_{measured}" for measured in words_of(ALL)} <= summary.keys()
        for measured, value in expected.items():
            assert summary[f"{name}_{measured}"] == pytest.approx(value, abs=1e-4), (name, measured)
            assert (f"{name}_{measured}" in run.metrics[-1]) == (name == "validation")
        if name == "validation":  # of which there are features in every round
            known, measured = (predict(digits.x_train[each]).embeddings for each in (partition["server_index"], rows))
            votes = knn_by_hand(measured, known, digits.y_train[partition["server_index"]], 200, 10)
            assert summary["validation_knn_accuracy"] == pytest.approx(np.mean(votes == labels), abs=1e-4)
        else:
            assert summary["test_knn_accuracy"] is None
        assert run.tested_measures()["macro AUC"] == f"{100 * summary['test_auc']:.2f} %"
    assert "validation/auc" in curves(run.metrics[-1])


@pytest.mark.test_all
def test_measures_are_in_tables_reports_and_cards(measured_run, stub_run):
    run = read_run(measured_run)
    plain = read_run(stub_run[0])
    rows = [Row(name, {}, [each], 1, False) for name, each in {"a": run, "b": plain}.items()]
    first, second = (str(row["test macro AUC"]) for row in make_table(rows, 0.9))
    assert first == f"{100 * run.summary['test_auc']:.2f}" and second == "-"
    assert "test macro AUC" not in make_table(rows[1:], 0.9)[0]
    page = write_report(measured_run).read_text()
    card = (measured_run / "MODEL_CARD.md").read_text()
    for words in ("balanced accuracy", "macro precision", "few-shot accuracy", "macro F1", "sensitivity"):
        assert f"test {words}" in page
        assert re.search(rf"\| test {words} \| {run.tested_measures()[words]} \|", card)
    assert "long tail (imbalance 10)" in card
    assert (measured_run / "figures" / "measures.svg").exists()
