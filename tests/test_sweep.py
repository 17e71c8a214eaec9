"""Sweeps: the same table after an interruption, failures that take nothing down, every committed file."""

import csv
import json
import shutil

import pytest

import launch
from conftest import ROOT
from fedjax_ssl import sweep as sweep_module
from fedjax_ssl.errors import BusyError, TrainingError, UserError
from fedjax_ssl.sweep import Sweep, load_sweep, plan, progress_of, run_sweep
from fedjax_ssl.sweep_table import mean_and_spread, rounds_text

FILE = """
from fedjax_ssl.sweep import Sweep

def get_sweep():
    return Sweep(
        config="{config}",
        methods={{"Anchors only": "anchors_only", "Centralised": "centralised"}},
        seeds=(0, 1),
        fields={{"data.num_anchors": (40,)}},
        target_accuracy=0.3,
    )
"""
CONFIG = """
import sys
sys.path.insert(0, "{tests}")
from conftest import make_tiny_config
from fedjax_ssl.config import apply_arguments

def get_config(arguments=""):
    return apply_arguments(make_tiny_config(num_rounds=2), arguments)
"""


@pytest.fixture(scope="module")
def sweep_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "tiny.py").write_text(CONFIG.format(tests=ROOT / "tests"))
    (folder / "sweep.py").write_text(FILE.format(config=folder / "tiny.py"))
    return str(folder / "sweep.py")


@pytest.fixture(scope="module")
def finished_sweep(sweep_file, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished_sweep")
    run_sweep(sweep_file, workdir)
    return workdir


def test_the_table_says_what_the_runs_say(finished_sweep):
    rows = list(csv.DictReader((finished_sweep / "table.csv").open()))
    assert [row["method"] for row in rows] == ["Anchors only", "Centralised (labels revealed)"]
    for row, name in zip(rows, ("Anchors_only", "Centralised")):
        folders = sorted((finished_sweep / name / "num_anchors=40").glob("seed_*"))
        summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
        assert [summary["seed"] for summary in summaries] == [0, 1] and row["seeds"] == "2 of 2"
        a, b = (100 * summary["test_accuracy"] for summary in summaries)
        assert row["test accuracy"] == f"{(a + b) / 2:.2f} ± {abs(a - b) / 2**0.5:.2f}"
        assert all(summary["labels_revealed"] == (name == "Centralised") for summary in summaries)
    markdown = (finished_sweep / "table.md").read_text()
    assert all(row["test accuracy"] in markdown for row in rows)


def test_a_sweep_that_was_stopped_ends_in_the_same_table(finished_sweep, sweep_file, tmp_path, monkeypatch, capsys):
    """Half of the runs are there; the table, but for its seconds, is that of the sweep that nobody stopped."""
    half = tmp_path / "half"
    shutil.copytree(finished_sweep / "Anchors_only", half / "Anchors_only")
    shutil.rmtree(half / "Anchors_only" / "num_anchors=40" / "seed_1")
    trained = []
    original = sweep_module.train
    monkeypatch.setattr(
        sweep_module, "train", lambda config, folder: (trained.append(config.seeds), original(config, folder))
    )
    capsys.readouterr()
    assert launch.main(["sweep", sweep_file, f"--workdir={half}", "--dry_run"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["finished", "do", "do", "do"]
    assert trained == []
    assert launch.main(["sweep", sweep_file, f"--workdir={half}"]) == 0
    assert trained == [(1,), (0, 1)]
    tables = [list(csv.DictReader((folder / "table.csv").open())) for folder in (finished_sweep, half)]
    for table in tables:
        for row in table:
            row.pop("seconds")
    assert tables[0] == tables[1]


def test_a_run_that_fails_is_reported_and_the_others_go_on(sweep_file, tmp_path, monkeypatch, capsys):
    def train(config, folder):
        if 0 in config.seeds and config.method == "anchors_only" and not config.data.centralised:
            raise TrainingError("no luck")
        for seed in config.seeds:
            run = folder / f"seed_{seed}"
            run.mkdir(parents=True)
            own = sweep_module.for_seed(config, seed).to_dict()
            (run / "config.json").write_text(json.dumps(own))
            summary = dict.fromkeys(("test_accuracy", "best_test_accuracy", "bytes_down", "bytes_up", "seconds"), 0.5)
            (run / "summary.json").write_text(json.dumps(summary))
            (run / "metrics.jsonl").write_text('{"round": 1, "test_accuracy": 0.5}\n')

    monkeypatch.setattr(sweep_module, "train", train)
    assert launch.main(["sweep", sweep_file, f"--workdir={tmp_path}"]) == 3
    errors = capsys.readouterr().err
    assert "failed: Anchors only, data.num_anchors 40, seed 0: TrainingError: no luck" in errors
    assert "1 of 4 runs" in errors
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert [row["seeds"] for row in rows] == ["1 of 2", "2 of 2"]


def test_what_another_process_is_at_work_on_is_left_to_it(sweep_file, tmp_path, monkeypatch, capsys):
    taken = []

    def train(config, folder):
        taken.append(config.method)
        raise BusyError("another process is training")

    monkeypatch.setattr(sweep_module, "train", train)
    assert launch.main(["sweep", sweep_file, f"--workdir={tmp_path}"]) == 0
    assert taken == ["anchors_only"] * 2  # tried once for each row, and no seed by itself
    assert capsys.readouterr().err.count("left to another process") == 2


def test_bad_sweeps_say_so(sweep_file, tmp_path, capfd):
    for words, line in [
        (["sweep"], "which sweep?"),
        (["sweep", "nowhere.py", f"--workdir={tmp_path}"], "no config file nowhere.py"),
        (["sweep", sweep_file], "needs a --workdir"),
        (["sweep", sweep_file, f"--workdir={tmp_path}", "--config.num_round=1"], "the nearest is config.num_rounds"),
        (
            ["sweep", sweep_file, f"--workdir={tmp_path}", "--config.client.epochs=0"],
            "client.epochs must be at least 1",
        ),
        (["sweep", str(launch.QUICKSTART), f"--workdir={tmp_path}"], "no function get_sweep"),
    ]:
        assert launch.main(words) == 2
        error = capfd.readouterr().err.strip()
        assert error.startswith("error: ") and line in error and "\n" not in error
    assert not list(tmp_path.iterdir())
    sweep = load_sweep(sweep_file)
    with pytest.raises(UserError, match=r"sets data\.nothing"):
        plan(sweep._replace(common={"data.nothing": 1}), tmp_path)
    with pytest.raises(UserError, match="share a folder"):
        plan(sweep._replace(methods={"A b": "", "A_b": ""}), tmp_path)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "sweeps").glob("*.py")), ids=lambda path: path.stem)
def test_every_sweep_file_is_valid_and_says_how_to_run_it(path, tmp_path):
    sweep = load_sweep(str(path))
    cells = plan(sweep, tmp_path)
    assert isinstance(sweep, Sweep) and cells
    assert progress_of(cells[0], sweep.seeds[0]) == "to do"
    assert f"python launch.py sweep configs/sweeps/{path.name}" in path.read_text()


def test_rounds_and_spread():
    assert rounds_text([3, None, 6]) == "4.5 (2 of 3)" and rounds_text([2]) == "2.0" and rounds_text([None]) == "-"
    assert mean_and_spread([1.0, 3.0]) == "2.00 ± 1.41" and mean_and_spread([1.0]) == "1.00"
