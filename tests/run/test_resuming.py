"""A workdir alone resumes the run or the seeds in it; code that it names is imported only on demand."""

import json
import shutil

import pytest

import launch
from fedjax_ssl import UserError, train
from fedjax_ssl.records.workdir import save_seeds
from fedjax_ssl.run.resuming import saved_config
from fedjax_ssl.sweep import run_sweep
from tests.helpers.stub import STUB, make_stub_config


def test_a_run_is_resumed_by_its_folder_alone(stub_run, tmp_path, capfd):
    run = tmp_path / "run"
    train(make_stub_config(num_rounds=2), run)
    words = [f"--workdir={run}", "--config.num_rounds=4"]
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    capfd.readouterr()
    assert launch.main(words) == 2  # the method is from a file, and the folder may be anybody's
    line = capfd.readouterr().err
    assert f"names code, method={STUB}, which would be run" in line and "--allow_code" in line
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert launch.main([*words, "--allow_code"]) == 0
    assert (run / "metrics.jsonl").read_bytes() == (stub_run[0] / "metrics.jsonl").read_bytes()


def test_several_seeds_are_resumed_by_their_folder_alone(stub_run, tmp_path):
    """Also seeds that had not begun."""
    train(make_stub_config(num_rounds=1, seeds=(0, 3)), tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "seed_3")
    words = ["--allow_code", "--config.num_rounds=4"]
    assert launch.main([f"--workdir={tmp_path / 'runs'}", *words]) == 0
    runs = [tmp_path / "runs" / f"seed_{seed}" for seed in (0, 3)]
    assert (runs[0] / "metrics.jsonl").read_bytes() == (stub_run[0] / "metrics.jsonl").read_bytes()
    assert json.loads((runs[1] / "summary.json").read_text())["rounds"] == 4


def test_seeds_that_were_begun_with_fewer_rounds_are_no_obstacle(tmp_path):
    for seed, rounds in enumerate((2, 4, 3)):
        (tmp_path / f"seed_{seed}").mkdir()
        config = make_stub_config(num_rounds=rounds, seed=seed)
        (tmp_path / f"seed_{seed}" / "config.json").write_text(json.dumps(config.to_dict()))
    save_seeds(tmp_path, (0, 1, 2))
    config = saved_config(str(tmp_path), allow_code=True)
    assert (config.num_rounds, config.seeds) == (4, (0, 1, 2))


@pytest.mark.parametrize("text", ["{", "3", '["x"]', "[Infinity]"])
def test_a_list_of_seeds_that_is_none(text, tmp_path):
    save_seeds(tmp_path, (1, 2))
    assert json.loads((tmp_path / "seeds.json").read_text()) == [1, 2]
    assert saved_config(str(tmp_path), allow_code=False) is None  # no run has begun
    (tmp_path / "seeds.json").write_text(text)
    with pytest.raises(UserError, match=r"cannot read .*seeds\.json"):
        saved_config(str(tmp_path), allow_code=False)


def test_a_later_start_with_other_seeds_forgets_none(tmp_path):
    save_seeds(tmp_path, (0, 1))
    save_seeds(tmp_path, (1, 2))
    assert json.loads((tmp_path / "seeds.json").read_text()) == [0, 1, 2]


@pytest.mark.parametrize("held", ["config.json", "seeds.json", "rows.json"])
def test_a_folder_holds_a_run_or_seeds_or_a_sweep(held, tmp_path):
    """A report of a folder with two of them would show only one."""
    (tmp_path / held).write_text("{}")
    starts = {
        "config.json": lambda: train(make_stub_config(), tmp_path),
        "seeds.json": lambda: train(make_stub_config(seeds=(0, 1)), tmp_path),
        "rows.json": lambda: run_sweep("configs/sweeps/mnist_methods.py", tmp_path, dry_run=True),
    }
    for own, start in starts.items():
        if own != held:
            with pytest.raises(UserError, match=r"holds (a run|runs of several seeds|a sweep); choose another workdir"):
                start()
    assert [path.name for path in tmp_path.iterdir()] == [held]
