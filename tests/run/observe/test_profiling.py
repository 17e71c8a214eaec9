"""The profile of a round: stages found in a real program, and shares that add up."""

import json

import pytest

import launch
from fedjax_ssl.run.observe.profiling import STAGES, profile
from tests.helpers.runs import TINY_BACKBONE, make_tiny_config

pytestmark = pytest.mark.test_all


def test_a_profile_says_where_the_time_goes(tmp_path, capsys):
    figures = profile(make_tiny_config(), rounds=2, workdir=tmp_path / "profile")
    assert figures["rounds"] == 2
    spent = figures["seconds_by_stage"]
    assert set(spent) == {*STAGES, "other"} and all(value >= 0 for value in spent.values())
    assert sum(spent.values()) == pytest.approx(figures["seconds_per_round"])
    assert spent["train"] > 0 and spent["evaluate"] > 0 and spent["server"] > 0
    assert figures["useful_lane_steps"] == 1.0 and figures["local_steps_per_round"] > 0
    assert figures["peak_memory_bytes"] > 2**20
    # For 10 images: two products in the hidden layer (images need no gradient), three in the classifier, and little
    # else.
    products = 10 * (2 * 64 * 32 + 3 * 32 * 10)
    assert 2 * products < figures["flops_per_local_step"] < 3 * products
    text = capsys.readouterr().out
    assert "other: between the stages" in text
    assert text == (tmp_path / "profile" / "profile.txt").read_text() and "useful lane steps" in text
    assert json.loads((tmp_path / "profile" / "profile.json").read_text()) == figures
    assert list((tmp_path / "profile" / "trace").rglob("*.trace.json.gz"))


def test_a_profile_of_a_run_without_clients(tmp_path, monkeypatch):
    monkeypatch.setattr("fedjax_ssl.run.programs.DISPATCH_CAPACITY", 1)  # the rounds of a profile are one dispatch
    config = make_tiny_config(**{"method": "server_only", "model.name": TINY_BACKBONE, "seeds": (3, 4)})
    figures = profile(config, rounds=2, workdir=tmp_path)
    assert (figures["rounds"], figures["config"]["seed"], figures["config"]["seeds"]) == (2, 3, [])
    assert figures["flops_per_local_step"] is figures["useful_lane_steps"] is None
    assert figures["seconds_by_stage"]["server"] > 0
    assert "local training" not in (tmp_path / "profile.txt").read_text()


def test_bad_profiles_say_so(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("fedjax_ssl.run.observe.profiling.build_whole", None)  # both must be refused before
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "config.json").write_text("{}")
    assert launch.main(["profile", f"--workdir={tmp_path / 'held'}"]) == 2
    assert "is not empty; a profile takes a fresh one" in capfd.readouterr().err
    assert launch.main(["profile", "--rounds=0", f"--workdir={tmp_path / 'new'}"]) == 2
    assert "rounds" in capfd.readouterr().err and not (tmp_path / "new").exists()
