"""A run and its folder: what is written, and that no stop loses anything."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import FrozenConfigDict

import launch
from fedjax_ssl import TrainingError, UserError, train
from fedjax_ssl.base.devices import use_platform
from fedjax_ssl.base.errors import BusyError
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.lines import METRICS
from fedjax_ssl.records.runs import read_run
from fedjax_ssl.records.workdir import Workdir
from fedjax_ssl.run import machine
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.run.machine import find_machine
from fedjax_ssl.run.under_way import resume_command
from tests.helpers.runs import ROOT, everything_in, make_tiny_config
from tests.helpers.stub import make_stub_config


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def newest_state(workdir, config):
    experiment = build_experiment(config)
    like = experiment.state_shape
    return Checkpoints(workdir / "checkpoints").restore(like).state


def test_what_a_run_leaves_behind(stub_run):
    workdir, state = stub_run
    config = json.loads((workdir / "config.json").read_text())
    assert config == json.loads(json.dumps(make_stub_config().to_dict()))
    lines = lines_of(workdir / "metrics.jsonl")
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    timings = lines_of(workdir / "timings.jsonl")
    assert [line["round"] for line in timings if "seconds" in line] == [1, 2, 3, 4]
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["test_accuracy"] == lines[-1]["test_accuracy"]
    assert summary["seconds"] > 0 and summary["compile_seconds"] > 0 and summary["bytes_down"] > 0
    assert summary["versions"]["jax"] == jax.__version__ and summary["backend"] == jax.default_backend()
    chex.assert_trees_all_equal(newest_state(workdir, make_stub_config()), jax.device_get(state))


def test_train_reads_the_configuration_once_and_also_a_frozen_one(stub_run, tmp_path):
    run, config = shutil.copytree(stub_run[0], tmp_path / "run"), make_stub_config()
    assert train(FrozenConfigDict(config), run).round == 4
    assert train(config, run, on_finish=lambda: setattr(config, "seed", 5)).round == 4


def test_views_and_pixels_are_as_the_configuration_says(tmp_path):
    """Data sets may allow flips; the digits do not. Without flip and crop, images stay the same."""
    key, images = jax.random.key(0), jnp.asarray(np.random.default_rng(0).integers(1, 256, (40, 8, 8, 1)), jnp.uint8)
    none = {"augment.flavour": "none", "augment.padding": 0}
    rng, labels = np.random.default_rng(1), np.arange(400) % 10
    x = rng.integers(0, 256, (400, 8, 8), np.uint8)
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=labels, x_test=x[:10], y_test=labels[:10])
    mine = {"data.source": "npz", "data.path": str(tmp_path / "mine.npz"), "data.flip": True}
    never, always = {"augment.flip": "never"}, {"augment.flip": "always"}
    for fields, mirrored in (({}, False), (always, True), (mine, True), (mine | never, False)):
        problem = build_experiment(make_tiny_config(**none, **fields)).problem
        for view in (problem.weak, problem.strong):
            changed = (np.asarray(view(key, images)) != np.asarray(images)).any(axis=(1, 2, 3))
            assert changed.any() == mirrored and not changed.all()
        assert problem.network.inputs.mean != (0.0,)
    bordered = {"augment.flavour": "none", "augment.border": "zeros", "data.normalisation": "none"}
    problem = build_experiment(make_tiny_config(**bordered)).problem
    assert problem.network.inputs[1:] == ((0.0,), (1.0,))
    for view in (problem.weak, problem.strong):
        assert (np.asarray(view(key, images)) == 0).any()  # black, unlike any image


def test_a_stub_run_is_left_as_it_is(stub_run, tmp_path, capsys):
    workdir, state = tmp_path / "run", stub_run[1]
    shutil.copytree(stub_run[0], workdir)
    before = everything_in(workdir)
    again = train(make_stub_config(), workdir)
    chex.assert_trees_all_equal(again, state)
    (workdir / "summary.json").unlink()  # as if killed after its last checkpoint
    meanwhile = []
    train(make_stub_config(), workdir, lambda: meanwhile.append(resume_command()))
    assert meanwhile == [f"python launch.py --workdir={workdir} --allow_code"]  # the last line after a signal
    assert everything_in(workdir) == before
    assert launch.main([f"--workdir={workdir}", "--allow_code"]) == 0
    said = capsys.readouterr().err
    assert f"{workdir} was finished, and nothing was trained; with a larger num_rounds it goes on" in said
    assert "compiling" not in said


@pytest.fixture
def start(tmp_path, started):
    """Starts launch.py with the tiny configuration in its own process."""
    config = tmp_path / "tiny.py"
    config.write_text("from tests.helpers.runs import make_tiny_config\ndef get_config(): return make_tiny_config()\n")

    def start(workdir, *words):
        command = [sys.executable, str(ROOT / "launch.py"), f"--config={config}", f"--workdir={workdir}", *words]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        started.append(process)
        return process

    return start


def wait_for(condition, process, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.002)


def has_rounds(workdir, count):
    path = workdir / "metrics.jsonl"
    return path.exists() and path.read_text().count("\n") >= count


@pytest.mark.test_all
def test_killed_at_any_moment_and_started_again_equals_uninterrupted(finished_run, start, tmp_path):
    """SIGKILL after a round's line, inside a checkpoint, and before the first checkpoint."""
    reference, state = finished_run
    workdir = tmp_path / "run"
    every_round = ("--config.checkpoint_every=1",)  # each dispatch then ends after a round
    folder = workdir / "checkpoints"

    def writing_a_checkpoint():
        return folder.exists() and any("tmp" in entry.name for entry in folder.iterdir())

    for moment in (lambda: (workdir / "config.json").exists(), writing_a_checkpoint, lambda: has_rounds(workdir, 2)):
        process = start(workdir, *every_round)
        wait_for(moment, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (workdir / "summary.json").exists()
    process = start(workdir, *every_round)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert (workdir / "metrics.jsonl").read_bytes() == (reference / "metrics.jsonl").read_bytes()
    chex.assert_trees_all_equal(newest_state(workdir, make_tiny_config()), jax.device_get(state))
    assert [line["round"] for line in lines_of(workdir / "timings.jsonl") if "seconds" in line] == [1, 2, 3, 4]


@pytest.mark.test_all
def test_a_signal_saves_and_the_same_command_goes_on(start, tmp_path):
    workdir = tmp_path / "run"
    words = ("--config.num_rounds=100000", "--config.checkpoint_every=100000")
    process = start(workdir, *words)
    wait_for(lambda: has_rounds(workdir, 3), process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    done = lines_of(workdir / "metrics.jsonl")[-1]["round"]
    assert Checkpoints(workdir / "checkpoints").rounds()[-1] == done >= 3
    process = start(workdir, *words)
    wait_for(lambda: has_rounds(workdir, done + 1), process)
    assert [line["round"] for line in lines_of(workdir / "metrics.jsonl")[: done + 1]] == list(range(1, done + 2))


def test_more_rounds_go_on_where_the_run_ended(tmp_path):
    short, whole = tmp_path / "short", tmp_path / "whole"
    train(make_stub_config(num_rounds=1), short)
    # Fields that change no result may differ. A CPU uses one lane anyway, which saves compiling.
    others = {"checkpoint_every": 3, "lanes": 1, "snapshot_rounds": (2, 50), "log.tensorboard": False}
    state = train(make_stub_config(num_rounds=3, **others), short)
    expected = train(make_stub_config(num_rounds=3), whole)
    chex.assert_trees_all_equal(state, expected)
    assert (short / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert json.loads((short / "config.json").read_text())["num_rounds"] == 3
    kept = read_run(short).snapshots()
    assert list(kept) == [1, 2, 3]  # 1 was once the last round
    accuracies = [np.mean(snapshot["predictions"] == snapshot["labels"]) for snapshot in kept.values()]
    np.testing.assert_allclose(accuracies, [line["test_accuracy"] for line in lines_of(short / "metrics.jsonl")])


@pytest.mark.parametrize("overrides, words", [
    ({"client.learning_rate": 0.5}, "client.learning_rate: 0.03 there, 0.5 here"),
    ({"num_rounds": 3}, "num_rounds: 4 there, 3 here"),
    ({"num_rounds": 9, "schedule": "cosine"}, "num_rounds"),
])  # fmt: skip
def test_another_configuration_is_refused_and_nothing_changes(stub_run, overrides, words):
    workdir, _ = stub_run
    before = {path: path.read_bytes() for path in workdir.glob("*") if path.is_file()}
    with pytest.raises(UserError, match="another configuration") as caught:
        train(make_stub_config(**overrides), workdir)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert before == {path: path.read_bytes() for path in workdir.glob("*") if path.is_file()}


@pytest.mark.parametrize(("name", "value"), [
    ("jax_debug_nans", True),
    ("jax_disable_jit", True),
    ("jax_enable_x64", True),
    ("jax_numpy_dtype_promotion", "strict"),
    ("jax_numpy_rank_promotion", "raise"),
    ("jax_default_prng_impl", "rbg"),
    ("jax_threefry_partitionable", False),
])  # fmt: skip
def test_settings_of_jax_in_which_no_run_trains_are_refused_before_anything_is_written(name, value, tmp_path):
    before = jax.config.values[name]
    jax.config.update(name, value)
    try:
        with pytest.raises(UserError, match=f"JAX's setting {name} is {value!r}, "):
            train(make_tiny_config(), tmp_path / "run")
    finally:
        jax.config.update(name, before)
    assert not (tmp_path / "run").exists()


def test_too_little_memory_is_met_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "memory_limit", lambda: 2**10)
    with pytest.raises(UserError, match=r"needs .* GiB, but the device has 0.0; lower lanes, client.batch_size"):
        train(make_stub_config(**{"residence.data": "device"}), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    names = []

    def check(self, program, name="a round"):
        names.append(name)
        if name == "the first state":  # may need more than a round if clients keep models
            raise UserError("too little")

    monkeypatch.setattr(machine.Machine, "check_memory", check)
    with pytest.raises(UserError, match="too little"):
        train(make_stub_config(), tmp_path / "run")
    assert names == ["a round", "the first state"] and list(tmp_path.iterdir()) == []


def test_a_round_in_which_every_upload_was_dropped_stops_the_run(stub_run, tmp_path):
    workdir, state = stub_run
    too_large = jax.tree.map(lambda leaf: np.full(leaf.shape, np.inf, leaf.dtype), state.model.params["classifier"])
    copy = tmp_path / "copy"
    shutil.copytree(workdir, copy, ignore=shutil.ignore_patterns("checkpoints"))
    model = state.model._replace(params={**state.model.params, "classifier": too_large})
    Checkpoints(copy / "checkpoints").save(4, state._replace(model=model))
    with pytest.raises(TrainingError, match="round 5: none of the 4 uploads is usable"):
        train(make_stub_config(num_rounds=5), copy)
    assert Checkpoints(copy / "checkpoints").rounds()[-1] == 4


def test_two_processes_do_not_share_a_folder(tmp_path):
    """Neither while one has it open, nor when one filled it while the other compiled."""
    config = make_tiny_config().to_dict()
    late, early = Workdir(tmp_path / "run", config), Workdir(tmp_path / "run", config)
    early.begin(0)
    early.append(METRICS, [{"round": 1}])
    with pytest.raises(BusyError, match="another process"):
        Workdir(tmp_path / "run", config)
    early.close()
    with pytest.raises(BusyError, match="another process"):
        late.begin(0)
    assert early.read(METRICS) == [{"round": 1}]


def test_a_report_that_was_interrupted_is_written_by_the_next_start(stub_run, tmp_path, monkeypatch):
    made, run = [], tmp_path / "run"
    shutil.copytree(stub_run[0], run)

    def write_report(path):
        made.append(path)
        (path / "report.html").write_text("")

    monkeypatch.setattr("fedjax_ssl.report.write_report", write_report)
    config = make_stub_config(**{"log.report": True})
    for reports in (1, 1):  # the first start writes it, the second finds it
        train(config, run)
        assert len(made) == reports
    later = (run / "report.html").stat().st_mtime + 1
    os.utime(run / "summary.json", (later, later))  # with rounds that the report lacks
    train(config, run)
    assert made == [run, run]


def test_nothing_compiles_after_the_first_round(stub_run, tmp_path):
    """Neither for the shorter last dispatch, nor after resuming at any round."""
    from jax._src import test_util

    config = make_stub_config(num_rounds=3, rounds_per_dispatch=2)
    train(config, tmp_path / "run")
    compiled = []
    import fedjax_ssl.run.train as module

    run_rounds = module.run_rounds

    def counting(*arguments):
        with test_util.count_jit_compilation_cache_miss() as count:
            state = run_rounds(*arguments)
        compiled.append(count())
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "run_rounds", counting)
        train(make_stub_config(num_rounds=8, rounds_per_dispatch=2), tmp_path / "run")
    assert compiled == [0]
    # The number of rounds per dispatch changes no figure.
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines()
    assert lines[:4] == (stub_run[0] / "metrics.jsonl").read_bytes().splitlines()


@pytest.mark.parametrize(("platform", "name", "lanes"), [
    ("cpu", "cnn", 1), ("gpu", "cnn", 10), ("tpu", "wrn28_2", 4), ("tpu", "wrn28_8", 1), ("tpu", "lenet", 10),
])  # fmt: skip
def test_lanes_by_default_are_those_that_fill_the_platform(platform, name, lanes):
    config = make_tiny_config(**{"model.name": name, "model.normalisation": "none" if name == "lenet" else "static"})
    with use_platform(platform):
        assert find_machine(config).lanes(10) == lanes
