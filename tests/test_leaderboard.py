"""The leaderboard's page is made from the committed records, whose figures are those of the runs' folders."""

import importlib
import json
import runpy
import shutil

import numpy as np
import pytest
from scipy import stats

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.methods import METHODS
from fedjax_ssl.records.lines import METRICS_SUM, checksum_of_records
from fedjax_ssl.sweep import Sweep, load_sweep
from fedjax_ssl.sweep.search import Search
from tests.helpers.stub import make_stub_config


@pytest.fixture
def board(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "docs"))
    return importlib.import_module("leaderboard")


@pytest.fixture
def shared(board):
    return importlib.import_module("board_records")


def move(board, folder, monkeypatch):
    """Lets the page have its records in another folder."""
    monkeypatch.setattr(board, "BOARDS", board.BOARDS._replace(folder=folder))


@pytest.mark.parametrize("data", ["digits", "table"])
def test_a_board_has_every_method_of_its_setting(root, data):
    for labels in ("server", "clients", "some_clients"):
        sweep = load_sweep(f"{root / 'configs' / 'sweeps' / 'leaderboard.py'}:{data}_{labels}")
        rows = [row if isinstance(row, str) else row[0] for row in sweep.methods.values()]
        words = {word for row in rows for word in row.split(",")}
        named = METHODS.keys() & words
        fitting = {name: entry for name, entry in METHODS.items() if data == "digits" or not entry.images_alone}
        assert named == {name for name, entry in fitting.items() if labels in entry.settings}


def test_the_committed_records_make_a_page(board):
    page = board.page()
    recorded = board.BOARDS.recorded()
    assert len(recorded) >= 10 and all(f"## {name.partition('_')[0]}: " in page for name in recorded)


RUN = {  # a line of records
    "method": "FedAvg", "seed": "2", "rounds": "4", "accuracies": "1 2 3", "MB": "1", "seconds": "1", "tries": "3",
    "chosen": "", "commit": "", "jax": "1", "processor": "-", "records": "1",
}  # fmt: skip


@pytest.fixture
def tried(board, shared, stub_run, tmp_path, monkeypatch):
    """A finished row with the rate of its try 1, after try 0 with its own rate was worse and try 2 diverged."""
    (tmp_path / "tiny.py").write_text("from tests.helpers.stub import make_stub_config as get_config\n")
    rate = make_stub_config().client.learning_rate
    search = Search({"*": {"client.learning_rate": (rate,)}}, {})
    sweep = Sweep(f"{tmp_path / 'tiny.py'}", {"FedAvg": ("", {"client.learning_rate": 0.5})}, search=search)
    shutil.copytree(stub_run[0], tmp_path / "runs" / "FedAvg" / "seed_0")
    for place, own in enumerate((0.5, rate, rate)):
        folder = tmp_path / "runs" / "tries" / f"FedAvg_try_{place}" / "seed_1000"
        shutil.copytree(stub_run[0], folder)
        config = json.loads((folder / "config.json").read_text())
        config |= {"seed": 1000, "client": {**config["client"], "learning_rate": own}}
        (folder / "config.json").write_text(json.dumps(config))
        with_accuracy(folder, 0.01 * place)
    (folder / "summary.json").unlink()
    with (folder / "run.log").open("a") as log:
        log.write("2000-01-01 00:00:00 ended by TrainingError: round 4: the global state is not finite\n")
    monkeypatch.setattr(shared, "load_sweep", lambda name: sweep)
    move(board, tmp_path / "records", monkeypatch)
    monkeypatch.setattr(shared, "LAST", 3)  # of the four rounds
    return tmp_path / "runs"


def with_accuracy(folder, accuracy):
    """Gives the last round of a run another accuracy, and a summary of it."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[-1]["test_accuracy"] = accuracy
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {"rounds": len(lines), METRICS_SUM: checksum_of_records(folder, len(lines))}
    (folder / "summary.json").write_text(json.dumps(summary))


def to_csv(board, lines):
    rows = [",".join(f'"{cell}"' for cell in line.values()) for line in lines]
    return "\n".join([",".join(board.BOARDS.columns()), *rows])


def test_a_record_has_the_figures_of_the_run_and_is_replaced_by_a_later_one(board, tried):
    folder = tried / "FedAvg" / "seed_0"
    board.BOARDS.folder.mkdir()
    (board.BOARDS.folder / "tiny.csv").write_text(to_csv(board, [{**RUN, "seed": "0"}, RUN]))
    board.BOARDS.add(tried, "tiny")
    replaced, kept = board.BOARDS.read("tiny")
    assert kept == RUN
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert replaced["rounds"] == str(len(lines)) and replaced["seed"] == "0"
    accuracies = [100 * line["test_accuracy"] for line in lines][-3:]
    assert [float(value) for value in replaced["accuracies"].split()] == pytest.approx(accuracies, abs=6e-4)
    assert replaced["tries"] == "3" and replaced["records"] in (folder / "summary.json").read_text()
    sent = sum(line["bytes_down"] + line["bytes_up"] for line in lines) / 1e6
    assert float(replaced["MB"]) == pytest.approx(sent, rel=1e-3)
    rate = json.loads((folder / "config.json").read_text())["client"]["learning_rate"]
    assert replaced["chosen"] == f"client.learning_rate={rate}"

    lines[-1]["test_accuracy"] += 0.01  # a figure that the run did not have
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    with pytest.raises(UserError, match="not of the records"):
        board.BOARDS.add(tried, "tiny")
    assert board.BOARDS.read("tiny") == [replaced, kept]


def test_a_row_is_recorded_with_the_fields_of_its_best_try_alone(board, shared, tried, monkeypatch):
    first, third = (tried / "tries" / f"FedAvg_try_{place}" / "seed_1000" for place in (0, 2))
    with_accuracy(first, 1.0)
    with pytest.raises(UserError, match=r"after 3 tries: it differs in client\.learning_rate"):
        board.BOARDS.record("tiny", tried)
    with_accuracy(first, 0.0)
    with (third / "run.log").open("a") as log:
        log.write("2000-01-01 00:00:01 resumed after round 3\n")
    with pytest.raises(UserError, match="'FedAvg, try 2' is not over"):
        board.BOARDS.record("tiny", tried)
    shutil.rmtree(third.parent)
    (line,) = board.BOARDS.record("tiny", tried)
    assert line["tries"] == "2"
    shutil.rmtree(tried / "tries")
    with pytest.raises(UserError, match=r"after 0 tries: it differs in client\.learning_rate"):
        board.BOARDS.record("tiny", tried)  # its fields are of no try
    config = json.loads((tried / "FedAvg" / "seed_0" / "config.json").read_text())
    own = shared.load_sweep("tiny")._replace(methods={"FedAvg": ("", {"num_clients": config["num_clients"]})})
    monkeypatch.setattr(shared, "load_sweep", lambda name: own)
    (line,) = board.BOARDS.record("tiny", tried)
    assert line["tries"] == "0" and line["chosen"] == ""


def test_words_and_folders_that_are_not_of_the_board_are_refused(board, tried, tmp_path):
    with pytest.raises(UserError, match="num_clients=5' would make another board"):
        board.BOARDS.record("tiny", tried, ["--config.num_clients=5"])
    with pytest.raises(UserError, match=r"data\.path=x' would make another board than digits_server"):
        board.BOARDS.record("digits_server", tried, ["--config.data.path=x"])
    with pytest.raises(UserError, match="is not over, or not of this board"):
        board.BOARDS.record("tiny", tried, ["--config.data.path=x"])  # the runs had other data
    assert len(board.BOARDS.record("tiny", tried, ["--config.data.path=", "--config.lanes=2"])) == 1
    with pytest.raises(UserError, match="no finished run of tiny"):
        board.BOARDS.add(tmp_path / "nowhere", "tiny")
    assert not board.BOARDS.folder.exists()


@pytest.mark.parametrize("words", [["add"], ["add", "x"], ["page"], ["add", "x", "nope"]], ids=" ".join)
def test_a_wrong_command_is_one_line(root, monkeypatch, words):
    monkeypatch.setattr("sys.argv", ["leaderboard.py", *words])
    with pytest.raises(SystemExit, match=r"^error: .*(add WORKDIR BOARD|no argument 'nope')"):
        runpy.run_path(str(root / "docs" / "leaderboard.py"), run_name="__main__")


def test_records_of_others_are_checked(board, shared, monkeypatch):
    monkeypatch.setattr(shared, "load_sweep", lambda name: Sweep("x.py", {"FedAvg": ""}))
    monkeypatch.setattr(shared, "LAST", 3)
    good = to_csv(board, [RUN])
    assert board.BOARDS.parse("tiny", good) == [RUN]
    head, line = good.splitlines()
    for text in ("", head, good.replace("method,seed", "seed,method"), good.replace(",rounds", "")):
        with pytest.raises(UserError, match="must have lines with the columns"):
            board.BOARDS.parse("tiny", text)
    wrong = {
        "rounds": ["", "x"], "accuracies": ["", "1 2", "1 2 3 4", "1 2 nan", "1 2 100.5", "1 2 -3"],
        "MB": ["inf"], "seconds": ["-1"], "tries": ["six"], "chosen": ["<script>", "a=1 | b"], "commit": ["main"],
        "jax": [""], "processor": ["<img src=x>", "|", "Int\ufffdl", "x\n# y"], "records": ["-", ""],
    }  # fmt: skip
    for name, value in [(name, value) for name, values in wrong.items() for value in values]:
        with pytest.raises(UserError, match=f"'FedAvg' with seed '2': {name} cannot be"):
            board.BOARDS.parse("tiny", to_csv(board, [{**RUN, name: value}]))
    with pytest.raises(UserError, match="one more cell"):
        board.BOARDS.parse("tiny", f'{good},"x"')
    for text in (good.replace("FedAvg", "Mine"), good.replace('"2"', '"9"'), f"{good}\n{line}"):
        with pytest.raises(UserError, match="the board has no such run, or the file has it twice"):
            board.BOARDS.parse("tiny", text)


def test_a_figure_that_does_not_follow_from_the_records_is_found(board, shared, tmp_path, monkeypatch):
    """Each figure is in the records or NumPy's result from them; all rows have equally many tries."""
    move(board, tmp_path, monkeypatch)
    monkeypatch.setattr(shared, "LAST", 2)
    lines = [
        {
            **RUN, "method": name, "seed": str(seed), "tries": "6",
            "accuracies": f"{at + seed} {at + seed + 1}", "MB": f"{at / 10 + seed}", "seconds": f"{at / 5 + seed}",
        }
        for name, at in (("Labels alone", 60), ("FixMatch", 70))
        for seed in range(2)
    ]  # fmt: skip

    def written(lines):
        (tmp_path / "digits_server.csv").write_text(to_csv(board, lines))
        return board.page()

    page = written(lines)
    assert "| 1 | **FixMatch** | 71.00 ± 0.71 | +10.00 ± 0.00 | 7.5 | 14.5 | 2 | its own values |" in page
    assert "| 2 | Labels alone | 61.00 ± 0.71 | - | 6.5 | 12.5 | 2 | its own values |" in page
    assert "6 tries a row." in page
    for name, value in {"accuracies": "70 72", "MB": "7.4", "seconds": "15", "seed": "2"}.items():
        assert written([*lines[:2], {**lines[2], name: value}, lines[3]]) != page
    chosen = [{**line, "chosen": "x=1"} for line in lines[2:]]
    assert written([*lines[:2], *chosen]) != page
    with pytest.raises(UserError, match="runs of 5 and 6 tries"):
        written([*lines[:3], {**lines[3], "tries": "5"}])
    with pytest.raises(UserError, match="runs of 2 and 4 rounds"):
        written([*lines[:3], {**lines[3], "rounds": "2"}])
    with pytest.raises(UserError, match="one method with different chosen fields"):
        written([*lines[:3], {**lines[3], "chosen": "x=1"}])


def test_ranks_and_paired_intervals(board):
    draws = np.random.default_rng(0).normal(size=(4, 5))
    names = ("Labels alone", "Level", "Best", "All labels")
    accuracies = dict(zip(names, draws + np.array([[70.0], [79.9], [80.0], [90.0]])))
    lines = [
        {
            **dict.fromkeys(board.BOARDS.columns(), "1"),
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
