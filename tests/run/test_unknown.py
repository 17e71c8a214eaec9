"""A run whose clients hold images of unknown classes: its records, and that it does not know these images."""

import json

import numpy as np
import pytest
from sklearn import metrics

from fedjax_ssl import load, train
from fedjax_ssl.run.features import read_data
from tests.helpers.runs import SMALL, make_fedanchor_config

pytestmark = pytest.mark.test_all


def test_every_line_says_what_the_model_makes_of_unknown_images(tmp_path):
    """Compares with scikit-learn and NumPy on the trained model's predictions."""
    workdir, fields = tmp_path / "run", {"confidence.threshold": 0.2, "num_rounds": 2, "data.unknown_classes": (8, 9)}
    config = make_fedanchor_config(**SMALL, method="fixmatch", **fields)
    train(config, workdir)
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    names = ("test_auroc", "test_open_accuracy", "qualified_unknown_share")
    assert len(lines) == 2 and all(0 < line[name] <= 1 for line in lines for name in names)
    predict, dataset = load(workdir, allow_code=True), read_data(config)
    assert predict.class_names == tuple("01234567") and len(dataset.unknown_test) + len(dataset.y_test) == 360
    known, unknown = (predict(images) for images in (dataset.x_test, dataset.unknown_test))
    right = known.labels == dataset.y_test
    scores = [np.asarray(each.probabilities).max(axis=1) for each in (known, unknown)]
    threshold = np.sort(scores[0])[len(scores[0]) // 20]
    expected = {
        "test_accuracy": right.mean(),
        "test_auroc": metrics.roc_auc_score(np.repeat([1, 0], list(map(len, scores))), np.concatenate(scores)),
        "test_open_accuracy": np.append(right & (scores[0] >= threshold), scores[1] < threshold).mean(),
    }
    summary = json.loads((workdir / "summary.json").read_text())
    for name, value in expected.items():
        assert lines[-1][name] == summary[name] == pytest.approx(value, abs=1e-5)
    assert summary["qualified_unknown_share"] == lines[-1]["qualified_unknown_share"]
