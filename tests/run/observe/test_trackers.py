"""Trackers of a run: TensorBoard shows the records once, W&B has a run for each seed; neither can stop a run."""

import json
import shutil
import sys
import types

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import launch
from fedjax_ssl import train
from fedjax_ssl.records.workdir import METRICS, TIMINGS, Workdir, read_records
from fedjax_ssl.run.observe.trackers import Trackers, curves, open_trackers
from tests.helpers.runs import SMALL, make_fedanchor_config, make_tiny_config

pytestmark = pytest.mark.usefixtures("quick_runs")


def events_of(workdir):
    return EventAccumulator(str(workdir / "tensorboard"), size_guidance={"scalars": 0}).Reload()


def points(events):
    """Tag -> [(round, value)]."""
    return {tag: [(e.step, np.float32(e.value)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def expected_points(lines, timings):
    seconds = {line["round"]: line["seconds"] for line in timings if "seconds" in line}
    expected = {}
    for line in lines:
        for tag, value in curves({**line, "seconds": seconds[line["round"]]}).items():
            expected.setdefault(tag, []).append((line["round"], np.float32(value)))
    return expected


@pytest.fixture
def copied(finished_fedanchor_run, tmp_path):
    """A run's folder after four rounds, without the tracker's files."""
    copy = tmp_path / "run"
    shutil.copytree(finished_fedanchor_run[0], copy, ignore=shutil.ignore_patterns("tensorboard"))
    return copy


@pytest.fixture
def reopen(copied):
    """Resumes the run from a round, as after a stop; returns its folder and its trackers."""
    open_folders = []

    def reopen(round_number, **fields):
        for folder in open_folders:
            folder.close()
        config = make_fedanchor_config(**SMALL, **fields)
        folder = Workdir(copied, config.to_dict())
        open_folders.append(folder)
        folder.begin(round_number)
        return folder, open_trackers(config, folder)

    yield reopen
    for folder in open_folders:
        folder.close()


def test_tensorboard_shows_what_the_records_say(finished_fedanchor_run):
    workdir, _ = finished_fedanchor_run
    events = events_of(workdir)
    lines = read_records(workdir / METRICS).lines
    shown = points(events)
    assert shown == expected_points(lines, read_records(workdir / TIMINGS).lines)
    for tag, name in {"test/accuracy": "test_accuracy", "test/loss": "test_loss", "server/loss": "server_loss",
                      "wire/bytes_down": "bytes_down", "wire/bytes_up": "bytes_up"}.items():  # fmt: skip
        assert [value for _, value in shown[tag]] == [np.float32(line[name]) for line in lines]
    assert {
        "pseudo_labels/anchor_head", "pseudo_labels/classification_head", "clients/qualified", "server/loss",
        "wire/bytes_up", "time/seconds_per_round",
    } < set(shown)  # fmt: skip
    assert not [tag for tag in shown if tag.startswith("method/")]  # FedAnchor's tags are all known
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert json.loads(text) == json.loads((workdir / "config.json").read_text())
    assert "_hparams_/session_start_info" in events.summary_metadata
    assert "_hparams_/session_end_info" in events.summary_metadata


def test_a_run_that_goes_on_shows_each_round_once(copied, reopen):
    lines, timings = read_records(copied / METRICS).lines, read_records(copied / TIMINGS).lines
    folder, trackers = reopen(4)
    with trackers:
        pass
    watching = events_of(copied)  # as an open TensorBoard
    assert points(watching) == expected_points(lines, timings)
    path = next((copied / "tensorboard").iterdir())
    path.rename(path.with_name("events.out.tfevents.1000000000.before"))  # file names have seconds; this is quicker

    folder, trackers = reopen(2)  # killed after a checkpoint at round 2
    assert points(events_of(copied)) == expected_points(lines[:2], timings)
    with trackers:
        for line in lines[2:]:
            folder.append(METRICS, [line])
            trackers.write([line], [{"round": line["round"], "seconds": 0.5}])
    assert len(list((copied / "tensorboard").iterdir())) == 1
    for events in (events_of(copied), watching.Reload()):
        shown = points(events)
        assert [step for step, _ in shown["test/accuracy"]] == [1, 2, 3, 4]
        shown.pop("time/seconds_per_round")
        expected = expected_points(lines, timings)
        expected.pop("time/seconds_per_round")
        assert shown == expected


def test_what_was_not_measured_has_no_point():
    row = {"round": 3, "qualified_accuracy": None, "server_loss": float("nan"), "set_size": 2.0, "uploads": 4}
    assert curves(row) == {"method/set_size": 2.0, "clients/uploads": 4}


def test_validation_has_curves_of_its_own():
    row = {"round": 3, "validation_accuracy": 0.5, "validation_loss": 1.5}
    assert curves(row) == {"validation/accuracy": 0.5, "validation/loss": 1.5}


@pytest.mark.parametrize("name, tag", [
    ("client_test_personal_worst_tenth", "client_tests/personal_worst_tenth"),
    ("attack_success", "attack/success"),
    ("test_attacked_class", "test/attacked_class"),
    ("clients_without_labels", "clients/without_labels"),
])  # fmt: skip
def test_figures_of_the_library_are_no_metrics_of_the_method(name, tag):
    assert curves({"round": 3, name: 0.5}) == {tag: 0.5}


def test_tensorboard_off(copied, reopen):
    _, trackers = reopen(4, **{"log.tensorboard": False})
    with trackers:
        trackers.write([{"round": 5}], [])
    assert not (copied / "tensorboard").exists()


def test_a_writer_that_fails_does_not_take_the_run_with_it(copied, reopen, capsys):
    (copied / "tensorboard").write_text("no folder")
    _, trackers = reopen(4)
    with trackers:
        trackers.write([{"round": 5}], [])
    errors = capsys.readouterr().err
    assert "warning: the run goes on without TensorBoard (FileExistsError" in errors and errors.count("\n") == 1

    class FullDisk:
        def write(self, rows):
            raise OSError("no space left")

    class Good:
        rows = ()

        def write(self, rows):
            self.rows += tuple(rows)

        def close(self, went_well):
            raise RuntimeError("no network")

    good = Good()
    with Trackers({"the disk": FullDisk, "the other": lambda: good}) as trackers:
        trackers.write([{"round": 1}], [{"round": 1, "seconds": 2.0}, {"round": 0, "compile_seconds": 3.0}])
        trackers.write([{"round": 2}], [])
    assert good.rows == ({"round": 1, "seconds": 2.0}, {"round": 2, "seconds": None})
    errors = capsys.readouterr().err
    assert errors.count("without the disk") == 1 and "without the other (RuntimeError: no network)" in errors


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


def test_wandb_has_one_run_that_goes_on(copied, reopen, wandb):
    on = {"log.wandb_project": "digits", "log.tensorboard": False}
    lines = read_records(copied / METRICS).lines
    folder, trackers = reopen(3, **on)
    with pytest.raises(KeyboardInterrupt), trackers:
        raise KeyboardInterrupt
    folder, trackers = reopen(2, **on)  # its checkpoint is older than W&B's last step
    with trackers:
        trackers.write(lines[2:], [])
    first, second = wandb.inits
    assert first["id"] == second["id"] == (copied / "wandb_id").read_text().strip()
    assert (first["project"], first["resume"], first["reinit"]) == ("digits", "allow", "create_new")
    assert first["config"] == folder.config and "mode" not in first  # W&B's own variables decide this
    (rows,) = wandb.kept.values()
    assert list(rows) == [1, 2, 3, 4]
    assert [row["test/accuracy"] for row in rows.values()] == [line["test_accuracy"] for line in lines]
    assert wandb.ends == [1, 0]


@pytest.mark.parametrize("name", ["wandb", ".wandb"])
def test_wandb_writes_through_no_link(name, copied, reopen, wandb, tmp_path, capsys):
    (copied / name).symlink_to(tmp_path)
    reopen(3, **{"log.wandb_project": "digits", "log.tensorboard": False})
    assert not wandb.inits and f"{name} is a link" in capsys.readouterr().err


def test_wandb_from_the_configuration_on(finished_run, tmp_path, wandb):
    """Seeds have their own runs in one group; earlier rounds are sent, too."""
    shutil.copytree(finished_run[0], tmp_path / "both" / "seed_0")
    config = make_tiny_config(num_rounds=5, seeds=(0,), **{"log.wandb_project": "digits"})
    train(config, tmp_path / "both")
    (arguments,) = wandb.inits
    assert (arguments["name"], arguments["group"]) == ("both/seed_0", "both")
    assert [list(rows) for rows in wandb.kept.values()] == [[1, 2, 3, 4, 5]] and wandb.ends == [0]


@pytest.mark.parametrize("module", [None, types.ModuleType("wandb")], ids=["missing", "a folder of its runs"])
def test_wandb_that_is_not_installed_is_met_before_anything_is_written(module, monkeypatch, tmp_path, capfd):
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.chdir(tmp_path)
    assert launch.main([f"--workdir={tmp_path / 'run'}", "--config.log.wandb_project=mine"]) == 2
    assert capfd.readouterr().err == (
        "error: log.wandb_project needs the package wandb: pip install 'fedjax_ssl[wandb]'\n"
    )
    assert list(tmp_path.iterdir()) == []
