"""Random search: equally many tries for every row, the best by validation accuracy alone, the table with its fields."""

import collections
import csv
import json

import numpy as np
import pytest

import launch
from fedjax_ssl.base.errors import TrainingError, UserError
from fedjax_ssl.sweep import run_sweep, work
from fedjax_ssl.sweep.search import LogUniform, Search, tries_of, with_best
from tests.helpers.runs import pretended

CONFIG = """
from tests.helpers.runs import make_tiny_config
from fedjax_ssl.config import apply_arguments

def get_config(arguments=""):
    return apply_arguments(make_tiny_config(), arguments)
"""
FILE = """
from fedjax_ssl.sweep import Sweep
from fedjax_ssl.sweep.search import LogUniform, Search

def get_sweep():
    return Sweep(
        config="{config}",
        methods={{"FedAvg": "supervised", "UDA": "uda", "FixMatch": "fixmatch"}},
        seeds=(0,),
        search=Search({{"*": {{"client.learning_rate": LogUniform(0.001, 0.1)}}}}, {{"data.validation": 10}}),
    )
"""
SEARCH = Search(
    {"*": {"client.learning_rate": LogUniform(0.001, 0.1)}, "Fix*": {"client.batch_size": (5, 10, 20)}},
    {"data.validation": 10},
)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The file of a sweep whose runs are only pretended; try 1 of each row is its best."""

    def train(config, folder, on_finish, root):
        for seed in config.seeds:
            pretended(folder, config, seed, 0.6 if "try_1" in folder.name else 0.5)

    monkeypatch.setattr(work, "train", train)
    (tmp_path / "tiny.py").write_text(CONFIG)
    (tmp_path / "sweep.py").write_text(FILE.format(config=tmp_path / "tiny.py"))
    return str(tmp_path / "sweep.py")


def test_draws_are_of_the_row_and_the_try_and_fill_the_range():
    rates = np.array([SEARCH.draw("FedAvg", number)["client.learning_rate"] for number in range(1, 2001)])
    assert rates.min() >= 0.001 and rates.max() <= 0.1
    # A third of the draws is in each third of the log range, up to four standard deviations.
    shares = np.histogram(np.log10(rates), bins=[-3, -7 / 3, -5 / 3, -1])[0] / 2000
    assert np.abs(shares - 1 / 3).max() < 4 * np.sqrt(2 / 9 / 2000)
    assert SEARCH.draw("FedAvg", 7) == SEARCH.draw("FedAvg", 7) != SEARCH.draw("FixMatch", 7)
    assert set(SEARCH.draw("FixMatch", 3)) == {"client.learning_rate", "client.batch_size"}
    assert {SEARCH.draw("FixMatch", number)["client.batch_size"] for number in range(1, 40)} == {5, 10, 20}
    assert SEARCH.draw("FedAvg", 0) == {}
    assert Search({"A [b]": {"seed": (1,)}}, {}).of("A [b]") == {"seed": (1,)}  # a name, though also a pattern


def test_every_row_has_the_same_number_of_tries():
    methods = {"FedAvg": "supervised", "FixMatch": ("fixmatch", {"num_rounds": 3})}
    tries = tries_of(methods, SEARCH, 3)
    assert list(tries) == [f"{name}, try {number}" for name in methods for number in range(3)]
    assert tries["FixMatch, try 0"] == ("fixmatch", {"num_rounds": 3, "data.validation": 10})
    assert list(tries_of({"A": ""}, Search({"B": {"seed": (1, 2)}}, {}), 3)) == ["A, try 0"]  # all would be equal
    assert tries["FedAvg, try 2"] == ("supervised", {"data.validation": 10, **SEARCH.draw("FedAvg", 2)})


def test_the_best_try_wins_and_one_without_a_number_never_does():
    found = {"FedAvg, try 0": 0.4, "FedAvg, try 2": 0.5, "FedAvg, try 3": float("nan")}
    said = []
    methods = {"FedAvg": ("supervised", {"num_rounds": 7}), "Other": "uda"}
    chosen = with_best(methods, SEARCH, 5, found, said.append)
    assert chosen == {**methods, "FedAvg": ("supervised", {"num_rounds": 7, **SEARCH.draw("FedAvg", 2)})}
    rate = SEARCH.draw("FedAvg", 2)["client.learning_rate"]
    assert said == [f"FedAvg: try 2 of 2, 50.00 % on validation images: client.learning_rate={rate}"]


def test_a_sweep_with_tries_runs_them_first_and_its_rows_with_the_best_fields(file, tmp_path, capsys):
    cells = run_sweep(file, tmp_path / "out", tries=2)
    err = capsys.readouterr().err
    tries = {(line["row"], line["try"]): line for line in csv.DictReader((tmp_path / "out" / "tries.csv").open())}
    assert len(tries) == 2 * len(cells) == 6
    for cell in cells:
        rates = []
        for number, accuracy in enumerate(("50.000", "60.000")):
            folder = tmp_path / "out" / "tries" / f"{cell.name}_try_{number}" / f"seed_{SEARCH.seed}"
            rates.append(json.loads((folder / "config.json").read_text())["client"]["learning_rate"])
            line = tries[cell.name, str(number)]
            assert (line["validation accuracy"], float(line["client.learning_rate"])) == (accuracy, rates[-1])
        config = json.loads((cell.folder / "seed_0" / "config.json").read_text())
        assert config["data"]["validation"] == 0
        assert config["client"]["learning_rate"] == rates[1] == cell.config.client.learning_rate != rates[0]
        assert rates[1] == SEARCH.draw(cell.name, 1)["client.learning_rate"] or cell.name == "FixMatch"
        assert f"{cell.name}: try 1 of 2" in err
    table = (tmp_path / "out" / "table.md").read_text()
    assert ", try " not in table and "| FedAvg (labels revealed) | 1 of 1 |" in table
    # A repetition leaves nothing to do, and a single row gets the same choice.
    run_sweep(file, tmp_path / "out", dry_run=True, tries=2)
    assert {line.split("  ")[1] for line in capsys.readouterr().out.splitlines() if "seed_" in line} == {"finished"}


def test_a_row_waits_for_a_try_that_failed_but_not_for_one_that_diverged(file, tmp_path, monkeypatch, capsys):
    pretend, trained = work.train, []

    def train(config, folder, on_finish, root):
        trained.append(folder.name)
        if folder.name == "FedAvg_try_1":
            raise TrainingError("no luck")
        if folder.name.startswith("UDA_try"):
            raise MemoryError("too large")
        pretend(config, folder, on_finish, root)

    monkeypatch.setattr(work, "train", train)
    command = ["sweep", file, f"--workdir={tmp_path / 'out'}", "--tries=2"]
    assert launch.main([*command, "--rows=UDA"]) == 3  # no try has made a folder
    assert "failed: UDA, try 0, seed 1000: MemoryError: too large" in capsys.readouterr().err
    assert launch.main([*command, "--rows=UDA;FedAvg"]) == 3
    assert "FedAvg" in trained and "UDA" not in trained
    errors = capsys.readouterr().err
    assert "failed: UDA, seed 0: a try of its row failed" in errors and "4 of 6 runs" in errors


def test_the_table_has_the_rows_of_processes_that_tune_other_rows(file, tmp_path, monkeypatch):
    """While a process trains its row, another one finishes the tries and the run of its own."""
    pretend = work.train

    def train(config, folder, on_finish, root):
        if folder.name == "FedAvg":
            monkeypatch.setattr(work, "train", pretend)
            run_sweep(file, tmp_path / "out", tries=2, rows="UDA")
        pretend(config, folder, on_finish, root)

    monkeypatch.setattr(work, "train", train)
    run_sweep(file, tmp_path / "out", tries=2, rows="FedAvg")
    rows = csv.DictReader((tmp_path / "out" / "table.csv").open())
    assert [(row["method"].split()[0], row["seeds"]) for row in rows] == [
        ("FedAvg", "1"),
        ("UDA", "1"),
        ("FixMatch", "0"),
    ]


@pytest.mark.parametrize("change, message", [
    (('validation": 10', 'validation": 0'), "need validation images"),
    (('validation": 10', 'validation": 10, "client.learning_rate": 0.1'), "is a column of its table or set for"),
    (
        ('validation": 10', 'validation": 10, "data.labels": "clients", "personal_parts": ("classifier",)'),
        "whose classifier nobody trains",
    ),
    (
        ("seeds=", "fields={'client.learning_rate': (0.1,)}, seeds="),
        r"draws client\.learning_rate, which is a column of its table or set for",
    ),
    (("search=Search", "search=None and Search"), "no `search`"),
])  # fmt: skip
def test_tries_that_cannot_be_are_refused_before_anything_is_written(file, tmp_path, change, message):
    text = (tmp_path / "sweep.py").read_text()
    assert change[0] in text
    (tmp_path / "sweep.py").write_text(text.replace(*change))
    with pytest.raises(UserError, match=message):
        run_sweep(file, tmp_path / "out", tries=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.test_all
def test_tries_that_differ_in_numbers_train_together(tmp_path, capfd):
    """In pairs of equal batch size. The table is that of tries that train alone, and each run is in its folder."""
    (tmp_path / "stub.py").write_text(CONFIG.replace("make_tiny_config", "make_stub_config").replace("runs", "stub"))
    search = """Search({"*": {"client.learning_rate": LogUniform(0.001, 0.1), "client.batch_size": (5, 10)}}, {})"""
    (tmp_path / "sweep.py").write_text(f"""
from fedjax_ssl.sweep import Sweep
from fedjax_ssl.sweep.search import LogUniform, Search

def get_sweep():
    return Sweep(
        config="{tmp_path / "stub.py"}", methods={{"Stub": ""}}, seeds=(0,), common={{"data.validation": 10}},
        search={search},
    )
""")
    tables = []
    for together in (1, 2):
        run_sweep(str(tmp_path / "sweep.py"), tmp_path / str(together), tries=6, together=together)
        tables.append((tmp_path / str(together) / "tries.csv").read_text())
    sizes = collections.Counter(line["client.batch_size"] for line in csv.DictReader(tables[0].splitlines()))
    assert len(sizes) == 2 and max(sizes.values()) >= 4  # a second pair of equal size
    told = [line for line in "".join(capfd.readouterr()).splitlines() if line.startswith("together: ")]
    assert [line.count("Stub, try") for line in told] == [2] * sum(number // 2 for number in sizes.values())
    assert tables[0] == tables[1]
    for folder in (tmp_path / "2" / "tries").iterdir():
        assert {path.name for path in folder.iterdir()} >= {"seed_1000"} and not (folder / "metrics.jsonl").exists()
