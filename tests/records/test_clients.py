"""Accuracy per client, for a run's last and best model, compared with a loop over a client's images."""

import csv
import json

import numpy as np
import pytest

import fedjax_ssl
import launch
from fedjax_ssl import train
from fedjax_ssl.base.files import replace_arrays
from fedjax_ssl.data import load_dataset
from fedjax_ssl.records.clients import accuracy_of_clients, over_clients
from fedjax_ssl.records.runs import read_run
from fedjax_ssl.report import write_report
from tests.helpers.stub import make_stub_config

pytestmark = pytest.mark.usefixtures("quick_runs")
NAMES = [f"client_accuracy_{figure}" for figure in ("mean", "worst_tenth", "spread")]


def by_hand(labels, predictions, held):
    """Averages the test accuracies of the classes of each client's images."""
    found = []
    for of_client in held:
        each = []
        for label, number in enumerate(of_client):
            tested = predictions[labels == label]
            if len(tested):
                each += [np.mean(tested == label)] * number
        found.append(np.mean(each) if each else np.nan)
    return np.array(found)


def test_accuracy_of_clients():
    rng = np.random.default_rng(0)
    labels, held = rng.integers(0, 4, 200), rng.integers(0, 9, (25, 6))  # classes 4 and 5 have no test images
    predictions = np.where(rng.random(200) < 0.2 * labels, labels, rng.integers(0, 6, 200))
    held[3], held[4] = 0, (0, 0, 0, 0, 5, 0)
    found = accuracy_of_clients(labels, predictions, held)
    np.testing.assert_allclose(found, by_hand(labels, predictions, held))
    assert np.isnan(found[3:5]).all() and np.isfinite(np.delete(found, [3, 4])).all()
    present = np.sort(np.delete(found, [3, 4]))  # 23 clients: a tenth, rounded up, is 3
    expected = {"mean": np.mean(present), "worst_tenth": np.mean(present[:3]), "spread": np.std(present)}
    assert over_clients(found) == pytest.approx(expected)
    assert over_clients(np.full(3, np.nan)) == {"mean": None, "worst_tenth": None, "spread": None}


def expected_figures(folder, predictions):
    digits = load_dataset(make_stub_config().data)
    with np.load(folder / "partition.npz") as partition:
        clients = np.split(partition["client_index"], np.cumsum(partition["client_size"])[:-1])
    held = np.array([np.bincount(digits.y_train[rows], minlength=10) for rows in clients])
    of_clients = np.sort(by_hand(digits.y_test, predictions, held))
    return [of_clients.mean(), of_clients[0], of_clients.std()]  # a tenth of 8 clients is one


HELD_OUT = {"data.validation": 50}  # the best of three rounds is not the last


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    """A run whose best round is not its last."""
    folder = tmp_path_factory.mktemp("held_out")
    config = make_stub_config(**HELD_OUT, num_rounds=3)
    train(config, folder / "run")
    return folder / "run"


def test_the_last_model_of_a_run(stub_run):
    folder, _ = stub_run
    digits, summary = load_dataset(make_stub_config().data), json.loads((folder / "summary.json").read_text())
    predictions = fedjax_ssl.load(folder, allow_code=True)(digits.x_test).labels
    assert [summary[name] for name in NAMES] == pytest.approx(expected_figures(folder, predictions))
    assert f"best_{NAMES[0]}" not in summary  # without validation images no best round can be chosen


def test_the_best_model_of_a_run(held_out, tmp_path):
    """The best round's predictions equal those of a run that ends there; continued, it has the same figures."""
    digits, summary = load_dataset(make_stub_config().data), json.loads((held_out / "summary.json").read_text())
    best = summary["best_round"]
    assert best < 3
    train(make_stub_config(**HELD_OUT, num_rounds=best), tmp_path / "run")
    predictions = fedjax_ssl.load(tmp_path / "run", allow_code=True)(digits.x_test).labels
    with np.load(held_out / "snapshots" / "best.npz") as taken:
        np.testing.assert_array_equal(taken["predictions"], predictions)
        assert taken["round"] == best
    assert [summary[f"best_{name}"] for name in NAMES] == pytest.approx(expected_figures(held_out, predictions))
    last = fedjax_ssl.load(held_out, allow_code=True)(digits.x_test).labels
    assert [summary[name] for name in NAMES] == pytest.approx(expected_figures(held_out, last))

    train(make_stub_config(**HELD_OUT, num_rounds=3), tmp_path / "run")
    resumed = json.loads((tmp_path / "run" / "summary.json").read_text())
    for name in NAMES:
        assert (resumed[name], resumed[f"best_{name}"]) == (summary[name], summary[f"best_{name}"])
    # Predictions of another round are not taken for the best round's.
    with np.load(tmp_path / "run" / "snapshots" / "best.npz") as taken:
        other = {**taken, "round": taken["round"] + 1}
    replace_arrays(tmp_path / "run" / "snapshots" / "best.npz", **other)
    assert list(read_run(tmp_path / "run").client_accuracies()) == ["last model"]


def test_reports_cards_and_tables_have_it(held_out, tmp_path):
    summary = json.loads((held_out / "summary.json").read_text())
    text, card = write_report(held_out).read_text(), (held_out / "MODEL_CARD.md").read_text()
    words = ["mean over clients", "worst tenth of clients", "spread over clients"]
    for name, word in zip(NAMES, words):
        assert f"{word} {100 * summary[name]:.2f} %" in text
        assert f"| {word} | {100 * summary[name]:.2f} % |" in card
        assert f"| {word} (best model) | {100 * summary[f'best_{name}']:.2f} % |" in card
    assert (held_out / "figures" / "client_accuracy.svg").exists()
    assert launch.main(["report", str(held_out), f"--out={tmp_path / 'all.html'}"]) == 0
    (row,) = csv.DictReader((tmp_path / "all.csv").open())
    (line,) = csv.DictReader((tmp_path / "all_runs.csv").open())
    for name, word in zip(NAMES, words):
        assert float(row[word]) == float(line[word]) == pytest.approx(100 * summary[name])
        assert float(line[f"{word} (best model)"]) == pytest.approx(100 * summary[f"best_{name}"])
    assert (tmp_path / "all_figures" / "client_accuracy.png").exists()
