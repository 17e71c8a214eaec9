"""Trackers of a run: TensorBoard shows each round once, W&B has a run for each seed."""

import json
import shutil
import sys
import types

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import launch
from fedjax_ssl.records.lines import METRICS, TIMINGS, read_records
from fedjax_ssl.records.workdir import Workdir
from fedjax_ssl.run.observe.trackers import curves, open_trackers
from tests.helpers.runs import make_tiny_config

LINES = [{"round": number, "test_accuracy": number / 8, "bytes_up": 3, "seconds": 0.5} for number in (1, 2, 3, 4)]


def events_of(workdir):
    return EventAccumulator(str(workdir / "tensorboard"), size_guidance={"scalars": 0}).Reload()


def points(events):
    """Tag -> [(round, value)]."""
    return {tag: [(e.step, np.float32(e.value)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def expected_points(lines):
    expected = {}
    for line in lines:
        for tag, value in curves(line).items():
            expected.setdefault(tag, []).append((line["round"], np.float32(value)))
    return expected


@pytest.fixture
def folder(tmp_path):
    """A run's folder that is open."""
    (tmp_path / "both").mkdir()
    folder = Workdir(tmp_path / "both" / "seed_0", make_tiny_config().to_dict())
    folder.begin(0)
    yield folder
    folder.close()


def send(folder, done, lines, **fields):
    """Starts the run's trackers after `done` rounds, as a run does, and gives them lines."""
    with open_trackers(make_tiny_config(**fields), folder, done) as writers:
        for write in writers:
            write(lines)
    return writers


def test_tensorboard_shows_what_the_records_say(stub_run):
    workdir, _ = stub_run
    events, timings = events_of(workdir), read_records(workdir / TIMINGS).lines
    seconds = {line["round"]: line["seconds"] for line in timings if "seconds" in line}
    lines = [{**line, "seconds": seconds[line["round"]]} for line in read_records(workdir / METRICS).lines]
    shown = points(events)
    assert shown == expected_points(lines)
    assert {"test/accuracy", "server/loss", "bytes/up", "qualified/per_client", "seconds"} < set(shown)
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert json.loads(text.strip("`\n")) == json.loads((workdir / "config.json").read_text())


def test_a_run_that_goes_on_shows_each_round_once(folder):
    """It was killed in its third round, after a checkpoint of the second."""
    send(folder, 0, LINES[:3])
    watching = events_of(folder.path)  # as an open TensorBoard
    assert points(watching) == expected_points(LINES[:3])
    send(folder, 2, LINES[2:])
    for events in (events_of(folder.path), watching.Reload()):
        assert points(events) == expected_points(LINES)


def test_what_was_not_measured_has_no_point():
    row = {"round": 3, "qualified_accuracy": None, "server_loss": float("nan"), "validation_loss": 2.0, "uploads": 4}
    assert curves(row) == {"validation/loss": 2.0, "uploads": 4}


def test_tensorboard_off(folder):
    assert send(folder, 0, LINES, **{"log.tensorboard": False}) == []
    assert not (folder.path / "tensorboard").exists()


@pytest.fixture
def wandb(monkeypatch):
    """A fake W&B that keeps what it is given; `kept` is its server, id -> rows by step."""
    fake = types.ModuleType("wandb")
    fake.kept, fake.inits, fake.ends = {}, [], []

    class FakeRun:
        def __init__(self, run_id):
            self.rows = fake.kept.setdefault(run_id, {})

        @property
        def step(self):
            return max(self.rows, default=-1) + 1

        def log(self, data, step, commit):
            assert commit and step >= self.step
            self.rows[step] = data

        def finish(self, exit_code):
            fake.ends.append(exit_code)

    def init(**arguments):
        fake.inits.append(arguments)
        return FakeRun(arguments["id"])

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_has_one_run_that_goes_on(folder, wandb):
    on = {"log.wandb_project": "digits", "log.tensorboard": False}
    with pytest.raises(KeyboardInterrupt), open_trackers(make_tiny_config(**on), folder, 0) as (write,):
        write(LINES[:3])
        raise KeyboardInterrupt
    send(folder, 2, LINES[2:], **on)  # its checkpoint is older than W&B's last step
    first, second = wandb.inits
    assert first["id"] == second["id"] == (folder.path / "wandb_id").read_text().split("\n")[0]
    assert (first["name"], first["group"]) == ("both/seed_0", "both")
    assert (first["project"], first["resume"], first["reinit"]) == ("digits", "allow", "create_new")
    assert first["config"] == folder.config and "mode" not in first  # W&B's own variables decide this
    assert wandb.kept == {first["id"]: {line["round"]: curves(line) for line in LINES}}
    assert wandb.ends == [1, 0]


def test_a_copied_workdir_has_a_run_of_its_own_in_wandb(folder, wandb, tmp_path):
    """A moved one goes on with its run."""
    on = {"log.wandb_project": "digits", "log.tensorboard": False}
    send(folder, 0, LINES[:2], **on)
    copy, moved = tmp_path / "copy", tmp_path / "moved"
    shutil.copytree(folder.path, copy)
    for path, done in ((copy, 2), (copy, 3)):
        send(types.SimpleNamespace(path=path, config=folder.config), done, LINES[done:], **on)
    shutil.move(copy, moved)
    send(types.SimpleNamespace(path=moved, config=folder.config), 3, LINES[3:], **on)
    first, *others = (init["id"] for init in wandb.inits)
    assert len({*others}) == 1 and first not in others
    assert list(wandb.kept[first]) == [1, 2]


@pytest.mark.parametrize("module", [None, types.ModuleType("wandb")], ids=["missing", "a folder of its runs"])
def test_wandb_that_is_not_installed_is_met_before_anything_is_written(module, monkeypatch, tmp_path, capfd):
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.chdir(tmp_path)
    assert launch.main([f"--workdir={tmp_path / 'run'}", "--config.log.wandb_project=mine"]) == 2
    assert capfd.readouterr().err == (
        "error: log.wandb_project needs the package wandb: pip install 'fedjax_ssl[wandb]'\n"
    )
    assert list(tmp_path.iterdir()) == []
