"""A run whose clients hold images of unknown classes: its records, and that it does not know these images."""

import json

import chex
import numpy as np
import pytest
from sklearn import metrics

from fedjax_ssl import load, train
from fedjax_ssl.run.features import read_data
from tests.helpers.runs import SMALL, make_fedanchor_config

pytestmark = pytest.mark.test_all


def unknown_digits(path, turned):
    """The digits with 8 and 9 as unknown classes; `turned`: their labels are exchanged."""
    digits = read_data(make_fedanchor_config())
    arrays = {name: getattr(digits, name) for name in ("x_train", "y_train", "x_test", "y_test")}
    if turned:
        arrays |= {name: np.where(arrays[name] >= 8, 17 - arrays[name], arrays[name]) for name in ("y_train", "y_test")}
    np.savez_compressed(path, **arrays)
    fields = {"method": "fixmatch", "confidence.threshold": 0.2, "num_rounds": 2, "data.unknown_classes": (8, 9)}
    return make_fedanchor_config(**SMALL, **fields, **{"data.source": "npz", "data.path": str(path)})


@pytest.fixture(scope="module")
def both_runs(tmp_path_factory):
    """Two runs that differ in unknown images' labels, as (folder, state), and the first one's configuration."""
    folder = tmp_path_factory.mktemp("unknown")
    configs = [unknown_digits(folder / f"{turned}.npz", turned) for turned in (False, True)]
    found = [(folder / str(number), train(config, folder / str(number))) for number, config in enumerate(configs)]
    return found, configs[0]


def test_labels_of_unknown_images_change_no_bit(both_runs):
    (first, one), (second, other) = both_runs[0]
    chex.assert_trees_all_equal(one, other)
    assert (first / "metrics.jsonl").read_bytes() == (second / "metrics.jsonl").read_bytes()


def test_every_line_says_what_the_model_makes_of_unknown_images(both_runs):
    """Compares with scikit-learn and NumPy on the trained model's predictions."""
    ((workdir, _), _), config = both_runs
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
