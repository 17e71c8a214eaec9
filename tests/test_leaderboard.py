"""The leaderboard's page is made from the committed records, whose figures are those of the runs' folders."""

import importlib.util
import json
import shutil

import numpy as np
import pytest
from scipy import stats

from fedjax_ssl.methods import METHODS
from fedjax_ssl.sweep import Cell, Sweep, load_sweep
from fedjax_ssl.sweep.search import LogUniform, Search
from tests.helpers.runs import make_tiny_config


@pytest.fixture
def board(root):
    spec = importlib.util.spec_from_file_location("leaderboard", root / "docs" / "leaderboard.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("data", ["digits", "table"])
def test_a_board_has_every_method_of_its_setting(root, data):
    for labels in ("server", "clients", "some_clients"):
        sweep = load_sweep(f"{root / 'configs' / 'sweeps' / 'leaderboard.py'}:{data}_{labels}")
        rows = [row if isinstance(row, str) else row[0] for row in sweep.methods.values()]
        words = {word for row in rows for word in row.split(",")}
        named = METHODS.keys() & words
        fitting = {name: entry for name, entry in METHODS.items() if data == "digits" or not entry.images_alone}
        assert named == {name for name, entry in fitting.items() if labels in entry.settings}


def test_the_page_is_the_one_that_the_committed_records_make(board, root):
    page = (root / "docs" / "leaderboard.md").read_text(encoding="utf-8")
    assert page == board.page(), "python docs/leaderboard.py > docs/leaderboard.md"


def test_a_record_has_the_figures_of_the_run_and_is_replaced_by_a_later_one(board, finished_run, tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "FedAvg" / "seed_0"
    shutil.copytree(finished_run[0], folder)
    sweep = Sweep("x.py", {"FedAvg": ""}, search=Search({"*": {"client.learning_rate": LogUniform(0.1, 1.0)}}, {}))
    for name in ("FedAvg_try_0", "FedAvg_try_1", "FedAvg_Semi_try_0"):
        (tmp_path / "runs" / "tries" / name / "seed_1000").mkdir(parents=True)
        (tmp_path / "runs" / "tries" / name / "seed_1000" / "config.json").write_text("{}")  # no summary: diverged
    planned = make_tiny_config(**{"client.learning_rate": 0.5})  # the row's own value, which a try replaced
    monkeypatch.setattr(board, "load_sweep", lambda name: sweep)
    monkeypatch.setattr(board, "plan", lambda *_: [Cell("FedAvg", {}, planned, folder.parent, (0, 1))])
    monkeypatch.setattr(board, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(board, "LAST", 3)  # of the four rounds
    (tmp_path / "records").mkdir()
    old = dict.fromkeys(board.COLUMNS, "1")
    text = "\n".join(",".join(f'"{line[name]}"' for name in board.COLUMNS) for line in (
        {**old, "method": "FedAvg", "seed": "0"}, {**old, "method": "FedAvg", "seed": "7"}
    ))  # fmt: skip
    (tmp_path / "records" / "tiny.csv").write_text(",".join(board.COLUMNS) + "\n" + text + "\n")

    board.add(tmp_path / "runs", "tiny")
    replaced, kept = board.read("tiny")
    assert kept == {**old, "method": "FedAvg", "seed": "7"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert replaced["rounds"] == str(len(lines)) and replaced["seed"] == "0"
    accuracies = [100 * line["test_accuracy"] for line in lines][-3:]
    assert [float(value) for value in replaced["accuracies"].split()] == pytest.approx(accuracies, abs=6e-4)
    assert replaced["tries"] == "2" and replaced["records"] in (folder / "summary.json").read_text()
    sent = sum(line["bytes_down"] + line["bytes_up"] for line in lines) / 1e6
    assert float(replaced["MB"]) == pytest.approx(sent, rel=1e-3)
    rate = json.loads((folder / "config.json").read_text())["client"]["learning_rate"]
    assert replaced["chosen"] == f"client.learning_rate={rate}"

    planned.num_clients += 1
    with pytest.raises(SystemExit, match="not of this board: it differs in num_clients"):
        board.add(tmp_path / "runs", "tiny")
    planned.num_clients -= 1
    lines[-1]["test_accuracy"] += 0.01  # a figure that the run did not have
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    with pytest.raises(SystemExit, match="not of the records"):
        board.add(tmp_path / "runs", "tiny")
    assert board.read("tiny") == [replaced, kept]


def test_a_figure_that_does_not_follow_from_the_records_is_found(board, tmp_path, monkeypatch):
    """Each figure is in the records or NumPy's result from them; all rows have equally many tries."""
    monkeypatch.setattr(board, "RECORDS", tmp_path)
    lines = [
        {
            **dict.fromkeys(board.COLUMNS, "1"), "method": name, "seed": str(seed), "tries": "6",
            "accuracies": f"{at + seed} {at + seed + 1}", "MB": f"{at / 10 + seed}", "seconds": f"{at / 5 + seed}",
        }
        for name, at in (("Labels alone", 60), ("FixMatch", 70))
        for seed in range(2)
    ]  # fmt: skip

    def written(lines):
        rows = [",".join(board.COLUMNS), *(",".join(line[name] for name in board.COLUMNS) for line in lines)]
        (tmp_path / "digits_server.csv").write_text("\n".join(rows) + "\n")
        return board.page()

    page = written(lines)
    assert "| 1 | **FixMatch** | 71.00 ± 0.71 | +10.00 ± 0.00 | 7.5 | 14.5 | 2 | 1 |" in page
    assert "| 2 | Labels alone | 61.00 ± 0.71 | - | 6.5 | 12.5 | 2 | 1 |" in page and "6 tries a row." in page
    for name, value in {"accuracies": "70 72", "MB": "7.4", "seconds": "15", "seed": "2"}.items():
        assert written([*lines[:2], {**lines[2], name: value}, lines[3]]) != page
    chosen = [{**line, "chosen": "x=1"} for line in lines[2:]]
    assert written([*lines[:2], *chosen]) != page
    with pytest.raises(SystemExit, match="rows of 5 and 6 tries"):
        written([*lines[:3], {**lines[3], "tries": "5"}])
    with pytest.raises(SystemExit, match="runs of 1 and 2 rounds"):
        written([*lines[:3], {**lines[3], "rounds": "2"}])
    with pytest.raises(SystemExit, match="one method with different chosen fields"):
        written([*lines[:3], {**lines[3], "chosen": "x=1"}])


def test_ranks_and_paired_intervals(board):
    draws = np.random.default_rng(0).normal(size=(4, 5))
    names = ("Labels alone", "Level", "Best", "All labels")
    accuracies = dict(zip(names, draws + np.array([[70.0], [79.9], [80.0], [90.0]])))
    lines = [
        {
            **dict.fromkeys(board.COLUMNS, "1"),
            "method": name,
            "seed": str(seed),
            "accuracies": f"{value - 1:.6f} {value + 1:.6f}",
        }
        for name in names
        for seed, value in enumerate(accuracies[name])
    ]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in board.table(lines).splitlines()[2:]]
    assert "| - | All labels |" in board.table(lines[-5:])  # a board without other rows
    assert rows[-1][:2] == ["-", "All labels"] and [row[0] for row in rows[:3]] == ["1", "2", "3"]
    assert rows[2][1] == "Labels alone" and rows[2][3] == "-"
    for row in rows[:2]:
        name = row[1].strip("*")
        assert row[2] == f"{accuracies[name].mean():.2f} ± {accuracies[name].std(ddof=1):.2f}"
        apart = accuracies[name] - accuracies["Labels alone"]
        low, high = stats.ttest_1samp(apart, 0).confidence_interval(0.95)
        assert row[3] == f"{apart.mean():+.2f} ± {(high - low) / 2:.2f}"
        assert row[1] == f"**{name}**"  # these two cannot be told apart
    low, high = stats.ttest_1samp(accuracies["Level"] - accuracies["Best"], 0).confidence_interval(0.95)
    assert low < 0 < high
