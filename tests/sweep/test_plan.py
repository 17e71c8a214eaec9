"""What a sweep's file says: its rows, their folders and fields, and what is refused."""

import pathlib
import re

import pytest

import launch
from fedjax_ssl.base.errors import UserError
from fedjax_ssl.sweep import Sweep, load_sweep, plan
from fedjax_ssl.sweep.search import LogUniform, Search
from tests.helpers.runs import ROOT


def test_fields_with_the_same_last_name_are_told_apart():
    """In folders and in the rows' names; other fields keep their last names."""
    fields = {"client.learning_rate": (0.1,), "server.learning_rate": (0.2,), "data.alpha": (0.5,)}
    (cell,) = plan(Sweep(config="configs/quickstart.py", methods={"a": ""}, fields=fields), pathlib.Path("runs"))
    values = "client.learning_rate=0.1,server.learning_rate=0.2,alpha=0.5"
    assert cell.folder == pathlib.Path("runs/a") / values
    assert cell.path_name() == f"a/{values.replace(',', ', ').replace('_', ' ')}"


def test_bad_sweeps_say_so(sweep_file, tmp_path, capfd):
    for words, line in [
        (["sweep"], "which sweep?"),
        (["sweep", "nowhere.py", f"--workdir={tmp_path}"], "no config file nowhere.py"),
        (["sweep", sweep_file], "sweep needs --workdir"),
        (["sweep", sweep_file, f"--workdir={tmp_path}", "--config.num_round=1"], "the nearest is config.num_rounds"),
        (
            ["sweep", sweep_file, f"--workdir={tmp_path}", "--config.client.epochs=0"],
            "client.epochs must be at least 1",
        ),
        (["sweep", str(launch.QUICKSTART), f"--workdir={tmp_path}"], "no function get_sweep"),
        (["sweep", f"{sweep_file}:svhn", f"--workdir={tmp_path}"], "takes 0 positional arguments"),
        (
            ["sweep", f"{ROOT}/configs/sweeps/fedanchor_table1.py:mnist", f"--workdir={tmp_path}"],
            "no argument 'mnist'; known: cifar10, cifar100, svhn",
        ),
    ]:
        assert launch.main(words) == 2
        error = capfd.readouterr().err.strip()
        assert error.startswith("error: ") and line in error and "\n" not in error
    assert not list(tmp_path.iterdir())
    sweep = load_sweep(sweep_file)
    with pytest.raises(UserError, match=r"sets data\.nothing"):
        plan(sweep._replace(common={"data.nothing": 1}), tmp_path)
    for fields in ({3: 1}, {"client": {"epochs": 1}}):
        with pytest.raises(UserError, match="the sweep sets"):
            plan(sweep._replace(methods={"A": ("", fields)}), tmp_path)
    with pytest.raises(UserError, match="share a folder"):
        plan(sweep._replace(methods={"A b": "", "A_b": ""}), tmp_path)


@pytest.mark.parametrize(("entry", "value", "message"), [
    ("target_accuracy", 90, "a share above 0 and at most 1, not 90"),
    ("seeds", (), "the values of seeds must be a tuple"),
    ("seeds", (0, 0), "seeds must be different whole numbers"),
    ("seeds", (-1, "a"), "seeds must be different whole numbers"),
    ("methods", ["semifl"], "object is not a mapping"),
    ("methods", {"A": ("semifl",)}, "the row 'A' must be a config's arguments or"),
    ("methods", {"A": ("", {"seed": 1})}, "seeds are no field of a sweep"),
    ("fields", {"seed": (5, 6)}, "seeds are no field of a sweep"),
    ("fields", {"data.source": "mnist"}, "the values of data.source must be a tuple"),
    ("search", Search({"*": {"data.alpha": 0.3}}, {}), "the values of data.alpha must be a tuple"),
    ("search", Search({"*": {"data.alpha": LogUniform(0, 1)}}, {}), "0 < low <= high"),
    ("search", Search({}, {}, 0), "that no row has as a seed, not 0"),
])  # fmt: skip
def test_entries_of_the_wrong_kind_are_refused(entry, value, message, monkeypatch):
    sweep = Sweep("configs/quickstart.py", {"A": ""})._replace(**{entry: value})
    monkeypatch.setitem(load_sweep.__globals__, "call_in_file", lambda *_: sweep)
    with pytest.raises(UserError, match=re.escape(message)):
        load_sweep("x.py")


def test_a_config_may_take_no_arguments(tmp_path):
    """Like --config; row names without Latin letters have folders, too."""
    (tmp_path / "plain.py").write_text("from fedjax_ssl import base_config as get_config")
    methods = {"基线": "", "方法": ("", {"num_rounds": 3})}
    cells = plan(Sweep(str(tmp_path / "plain.py"), methods), tmp_path)
    assert [cell.folder.name for cell in cells] == list(methods)


@pytest.mark.parametrize("field", [
    "data.server_labels",  # in the grid, although with a single value
    "server.epochs",  # a method's own field
    "data.centralised",  # set by a method's arguments
    "seeds",
])  # fmt: skip
def test_an_override_of_what_tells_rows_apart_is_refused(field, sweep_file, tmp_path, capfd, monkeypatch):
    methods = {"Stub": "", "Centralised": ("centralised", {"server.epochs": 1})}
    sweep = load_sweep(sweep_file)._replace(methods=methods)
    monkeypatch.setattr("fedjax_ssl.sweep.load_sweep", lambda file: sweep)
    value = {"data.server_labels": "60", "seeds": "(7,)"}.get(field, "1")
    words = ["sweep", sweep_file, f"--workdir={tmp_path}", "--config.client.epochs=1", f"--config.{field}={value}"]
    assert launch.main(words) == 2
    error = capfd.readouterr().err.strip()
    assert error.startswith(f"error: rows of the sweep have values of their own for config.{field}:")
    assert "\n" not in error and not list(tmp_path.iterdir())
    cells = plan(sweep, tmp_path, ["--config.client.epochs=1"])
    assert [cell.config.client.epochs for cell in cells] == [1, 1]


def test_a_field_that_a_method_sets_is_not_varied_for_it(sweep_file, tmp_path):
    own = ("centralised", {"data.server_labels": 20})
    sweep = load_sweep(sweep_file)._replace(
        methods={"Bound": own, "FedAnchor": ""}, fields={"data.server_labels": (40, 60), "client.epochs": (1, 2)}
    )
    runs = [(c.name, c.config.data.server_labels, c.config.client.epochs, c.grid) for c in plan(sweep, tmp_path)]
    grids = [{"data.server_labels": anchors, "client.epochs": epochs} for anchors in (40, 60) for epochs in (1, 2)]
    bounds = [{"data.server_labels": 20, "client.epochs": epochs} for epochs in (1, 2)]
    named = [("Bound", grid) for grid in bounds] + [("FedAnchor", grid) for grid in grids]
    assert runs == [(name, grid["data.server_labels"], grid["client.epochs"], grid) for name, grid in named]


def test_all_rows_have_the_arguments_behind_the_config(tmp_path):
    methods = {"A": "", "B": "server_labels=40,semifl"}
    sweep = Sweep(config="configs/fedanchor_mnist.py:strong,server_labels=250", methods=methods)
    found = [(c.config.method, c.config.schedule, c.config.data.server_labels) for c in plan(sweep, tmp_path)]
    assert found == [("fedanchor", "cosine", 250), ("semifl", "cosine", 40)]


def test_the_sweeps_of_the_page_are_what_it_says(tmp_path, monkeypatch, capsys):
    """Writes the page's files and runs its commands without training."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "how_to" / "sweeps.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    for language, text in blocks:
        if language == "python" and (name := re.match(r"# (\w+\.py)\n", text)):
            (tmp_path / name[1]).write_text(text)
    commands = [line for language, text in blocks if not language for line in text.splitlines()]
    (listed,) = re.findall(r"such as\s+`(runs/[^`]+)`", page)
    (command,) = (line for line in commands if line.endswith(" --dry_run"))
    assert launch.main(command.split()[2:]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == listed and len(lines) == 12
    assert {f"`{name}`" for name in Sweep._fields} == set(re.findall(r"^\| (`\w+`) \|", page, re.MULTILINE))
