"""Lanes split over devices, and seeds that share lanes, against one device and runs of their own."""

import csv
import json
import subprocess
import sys

import numpy as np
import pytest

from fedjax_ssl import train
from fedjax_ssl.data import federated, views
from fedjax_ssl.data.federated import table_width
from fedjax_ssl.run import experiment
from tests.helpers.runs import ROOT, make_tiny_config
from tests.helpers.stub import make_stub_config

pytestmark = pytest.mark.test_all


@pytest.mark.test_all
def test_a_round_on_eight_devices_equals_one_device():
    command = [sys.executable, "-m", "tests.helpers.devices_process", "8"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["apart"] < 1e-4 < report["moved"]
    assert report["qualified_accuracy"][0] == pytest.approx(report["qualified_accuracy"][1])
    # 16 jobs of 4 steps: each device steps twice 4 times, as one device does with eight lanes.
    assert report["lane_steps"] == [64, 64] and report["local_steps"] == 64
    # Bytes are counted, the last steps' losses and norms are sums in another order.
    assert max(report["metrics_apart"].values()) < 1e-4
    # The uploads stay where they were made, and their mean is reduced.
    assert not [shape for shape in report["gathered"] if shape[-2:] in report["weights"]]
    # One of them is in the branch of the mean that runs for uploads with numbers that are not finite.
    assert 1 <= report["all_reduces"] <= 5
    # Each device describes its share of 40 anchors, labels its share of 528 images and tests two chunks of 23 of 360.
    rows = [shape[0] * shape[1] for shape in report["gathered"] if len(shape) == 3]
    assert {40, 528, 368} <= set(rows) and all(shape[0] in (8, 16, 24) for shape in report["gathered"])
    # 37 rows on eight devices: two batches of three on each. Seeds in one program change nothing.
    assert report["rows"]["found"] == report["rows"]["expected"] and set(report["rows"]["seen"]) == {3}
    assert report["traffic"][0] == report["traffic"][1] and min(report["traffic"][0][:3]) > 0


def test_seeds_with_other_largest_clients_share_a_program(tmp_path, capfd, monkeypatch):
    """And have, to the bit, the results of runs of their own, in which rows have no more padding than needed."""
    fields = {"data.partition": "dirichlet_classes", "data.alpha": 1.0, "data.examples_per_client": 0, "num_rounds": 1}
    fields |= {"data.client_test_share": 0.2, "clients_per_round": 2, "server.epochs": 0, "server.pretrain_epochs": 0}
    train(make_tiny_config(seeds=(0, 1), **fields), tmp_path / "both")
    assert capfd.readouterr().err.count("compiled before") == 1
    for module in (federated, views, experiment):
        monkeypatch.setattr(module, "table_width", lambda sizes: sizes.max())
    train(make_tiny_config(seed=0, **fields), tmp_path / "alone")
    both, alone = (tmp_path / folder / "metrics.jsonl" for folder in ("both/seed_0", "alone"))
    assert both.read_text() == alone.read_text()
    sizes = [np.load(tmp_path / "both" / f"seed_{seed}" / "partition.npz")["client_size"] for seed in (0, 1)]
    assert sizes[0].max() < sizes[1].max() < table_width(sizes[0]) == table_width(sizes[1])


def test_several_seeds_end_in_a_table_and_a_page(tmp_path, capfd):
    config = make_stub_config(seeds=(2, 0), num_rounds=1)
    config.log.report = True
    train(config, tmp_path)
    said = capfd.readouterr().err
    accuracies = [
        100 * json.loads((tmp_path / f"seed_{seed}" / "summary.json").read_text())["test_accuracy"] for seed in (0, 2)
    ]
    shown = f"{np.mean(accuracies):.2f} ± {np.std(accuracies, ddof=1):.2f}"
    assert f"seeds 0, 2: test accuracy {shown} %" in said and f"report {tmp_path / 'report.html'}" in said
    (row,) = csv.DictReader((tmp_path / "table.csv").open())
    assert float(row["test accuracy std"]) == pytest.approx(np.std(accuracies, ddof=1))
    assert "1 configuration, 2 runs" in (text := (tmp_path / "report.html").read_text()) and shown in text
    before = (tmp_path / "report.html").stat().st_mtime_ns
    train(config, tmp_path)  # which has nothing left to do
    assert (tmp_path / "report.html").stat().st_mtime_ns == before
