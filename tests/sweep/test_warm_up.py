"""A sweep whose rows start from one trained model: it is trained once for each seed and value, before the rows."""

import csv
import json
import shutil

import chex
import jax
import pytest

import launch
from fedjax_ssl.base.errors import BusyError, TrainingError, UserError
from fedjax_ssl.engine.interface import State
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.serve.predictor import load
from fedjax_ssl.sweep import _plan_tries, load_sweep, plan, run_sweep, warm_ups_of, work
from fedjax_ssl.sweep.search import Search
from tests.helpers.runs import pretended

FILE = """
from fedjax_ssl.sweep import Sweep

def get_sweep():
    return Sweep(
        config="{config}",
        methods={{"Warm": "", "Cold": ("", {{"init_from": ""}})}},
        seeds=(0, 1),
        warm_up=("", {{"num_rounds": 1}}),
    )
"""


def model_after(folder, like, number):
    return Checkpoints(folder / "checkpoints").restore(State(None, like), round_number=number, part=True).state.model


@pytest.mark.test_all
def test_every_row_begins_with_the_model_of_its_seed(sweep_file, tmp_path, capsys, monkeypatch):
    root = tmp_path / "sweep"
    cells = run_sweep(sweep_file, root)
    like = build_experiment(cells[0].config).state_shape.model
    for seed in (0, 1):
        warm, row, cold = (root / name / f"seed_{seed}" for name in ("warm_up", "Warm", "Cold"))
        trained = model_after(warm, like, 1)
        chex.assert_trees_all_equal(model_after(row, like, 0).params, trained.params)
        fresh = model_after(cold, like, 0)
        assert any(jax.tree.leaves(jax.tree.map(lambda a, b: (a != b).any(), fresh.params, trained.params)))
        assert json.loads((row / "config.json").read_text())["init_from"] == "warm_up"
        facts = json.loads((row / "init_from.json").read_text())
        assert (facts["run"], facts["round"]) == (str(warm), 1)
        assert not (cold / "init_from.json").exists()
        assert load(row, allow_code=True).round == 2
    assert [row["method"] for row in csv.DictReader((root / "table.csv").open())] == ["Warm", "Cold"]

    # The folder may be moved: rows find the warm-up by its relative path.
    shutil.move(root, tmp_path / "elsewhere")
    monkeypatch.setattr(work, "train", lambda *arguments: pytest.fail("everything is finished"))
    capsys.readouterr()
    assert launch.main(["sweep", sweep_file, f"--workdir={tmp_path / 'elsewhere'}", "--dry_run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["finished"] * 6 and "warm_up/seed_0" in lines[0]
    run_sweep(sweep_file, tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "elsewhere" / "warm_up")  # which no run needs any more
    run_sweep(sweep_file, tmp_path / "elsewhere")


def test_a_warm_up_for_each_value_that_it_depends_on(sweep_file, tmp_path):
    sweep = load_sweep(sweep_file)._replace(
        methods={"Warm": "", "Cold": ("", {"init_from": ""}),
                 "Pinned": ("", {"data.server_labels": 20})},
        fields={"data.server_labels": (40, 60), "client.epochs": (1, 2)},
        warm_up=("", {"client.epochs": 5, "num_rounds": 1}),
    )  # fmt: skip
    cells = plan(sweep, tmp_path)
    found = {(cell.name, *cell.grid.values()): cell.config.init_from for cell in cells}
    for anchors in (40, 60):
        for epochs in (1, 2):
            assert found["Warm", anchors, epochs] == f"warm_up/server_labels={anchors},epochs=5"
            assert found["Cold", anchors, epochs] == ""
            assert found["Pinned", 20, epochs] == "warm_up/server_labels=20,epochs=5"
    warm_ups = {cell.folder.name: cell.config for cell in warm_ups_of(cells)}
    assert [config.data.server_labels for config in warm_ups.values()] == [40, 60, 20]
    assert {(config.client.epochs, config.num_rounds, config.init_from) for config in warm_ups.values()} == {(5, 1, "")}
    with pytest.raises(UserError, match=r"rows of the sweep have values of their own for config\.init_from"):
        plan(sweep, tmp_path, ["--config.init_from=x"])
    with pytest.raises(UserError, match="share a folder"):
        plan(sweep._replace(methods={"warm up": ("", {"client.epochs": 5})}), tmp_path)


def test_tries_have_a_warm_up_with_the_same_images_held_out(sweep_file, tmp_path):
    search = Search({"*": {"client.learning_rate": (0.1, 0.2)}}, {"data.validation": 10, "num_rounds": 3})
    cells = _plan_tries(load_sweep(sweep_file)._replace(search=search), tmp_path, (), 2)
    (warm_up,) = warm_ups_of(cells)
    assert (warm_up.config.data.validation, warm_up.config.num_rounds, warm_up.seeds) == (10, 1, (search.seed,))
    assert [(cell.config.data.validation, cell.config.num_rounds) for cell in cells] == [(10, 3)] * 4


def test_rows_whose_warm_up_failed_are_not_run(sweep_file, tmp_path, monkeypatch, capsys):
    trained = []

    def train(config, folder, on_finish, root):
        trained.append((folder.name, config.seeds))
        if folder.name == "warm_up" and 0 in config.seeds:
            raise TrainingError("no luck")
        for seed in config.seeds:
            pretended(folder, config, seed)

    monkeypatch.setattr(work, "train", train)
    assert launch.main(["sweep", sweep_file, f"--workdir={tmp_path}"]) == 3
    errors = capsys.readouterr().err
    assert "failed: warm up, seed 0: TrainingError: no luck" in errors
    assert "failed: Warm, seed 0: its warm-up failed" in errors and "2 of 6 runs" in errors
    assert trained == [("warm_up", (0, 1)), ("warm_up", (0,)), ("warm_up", (1,)), ("Warm", (1,)), ("Cold", (0, 1))]


def test_a_warm_up_that_another_process_is_at_is_waited_for(sweep_file, tmp_path, monkeypatch, capsys):
    """The other process ends one seed and gives up the other, which is then taken over."""
    trained, at_work = [], iter([True, True, True])

    def train(config, folder, on_finish, root):
        trained.append((folder.name, config.seeds))
        if folder.name == "warm_up" and next(at_work, False):
            raise BusyError(folder / f"seed_{config.seeds[0]}")
        for seed in config.seeds:
            pretended(folder, config, seed)

    def sleep(seconds):
        assert seconds > 0
        if not (tmp_path / "warm_up").exists():
            pretended(tmp_path / "warm_up", plan(load_sweep(sweep_file), tmp_path)[0].warm_up.config, 0)

    monkeypatch.setattr(work, "train", train)
    monkeypatch.setattr(work.time, "sleep", sleep)
    run_sweep(sweep_file, tmp_path)
    waited = [("warm_up", (0, 1)), ("warm_up", (1,)), ("warm_up", (1,)), ("warm_up", (1,))]
    assert trained == [*waited, ("Warm", (0, 1)), ("Cold", (0, 1))]
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warm up")]
    left = "warm up: left to another process"
    assert lines == ["warm up (warm-up): seeds 0, 1", left, "warm up (warm-up): seeds 1"]  # each once
