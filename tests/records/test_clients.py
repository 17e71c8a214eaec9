"""Accuracy per client, for a run's last model, compared with a loop over a client's images."""

import csv
import json
import shutil

import numpy as np
import pytest

import fedjax_ssl
import launch
from fedjax_ssl.data import load_dataset
from fedjax_ssl.records.clients import accuracy_of_clients, over_clients
from fedjax_ssl.report import write_report
from tests.helpers.stub import make_stub_config

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


def test_the_last_model_of_a_run(stub_run):
    folder, _ = stub_run
    digits, summary = load_dataset(make_stub_config().data), json.loads((folder / "summary.json").read_text())
    predictions = fedjax_ssl.load(folder, allow_code=True)(digits.x_test).labels
    assert [summary[name] for name in NAMES] == pytest.approx(expected_figures(folder, predictions))


def test_reports_cards_and_tables_have_it(stub_run, tmp_path):
    folder = shutil.copytree(stub_run[0], tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    text, card = write_report(folder).read_text(), (folder / "MODEL_CARD.md").read_text()
    words = ["mean over clients", "worst tenth of clients", "spread over clients"]
    for name, word in zip(NAMES, words):
        assert f"{word} {100 * summary[name]:.2f} %" in text
        assert f"| {word} | {100 * summary[name]:.2f} % |" in card
    assert (folder / "figures" / "client_accuracy.svg").exists()
    assert launch.main(["report", str(folder), f"--out={tmp_path / 'all.html'}"]) == 0
    (row,) = csv.DictReader((tmp_path / "all.csv").open())
    (line,) = csv.DictReader((tmp_path / "all_runs.csv").open())
    for name, word in zip(NAMES, words):
        assert float(row[word]) == float(line[word]) == pytest.approx(100 * summary[name])
