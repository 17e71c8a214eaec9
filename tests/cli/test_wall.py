"""Errors of the operating system or of files end in a line and a status; the line names a file with the traceback."""

import contextlib
import pathlib
import re
import subprocess
import sys
import zipfile

import jax.numpy as jnp
import pytest

import launch
from fedjax_ssl import StoppedError, UserError, train
from fedjax_ssl.base.errors import outside_reason
from fedjax_ssl.base.imports import run_file
from fedjax_ssl.cli import commands
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.lines import METRICS
from fedjax_ssl.records.workdir import Workdir
from fedjax_ssl.run import under_way
from fedjax_ssl.run.observe.listeners import SaveCheckpoints, WriteRecords
from tests.helpers.runs import ROOT, files_of_at_most
from tests.helpers.stub import make_stub_config

FULL = OSError(28, "No space left on device", "runs/a/metrics.jsonl")


def outcome(capfd, *words):
    """The exit status of a command and its line on stderr."""
    status = launch.main(list(map(str, words)))
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return status, lines[0]


@pytest.mark.parametrize(
    "error, line",
    [
        (FULL, "runs/a/metrics.jsonl: No space left on device"),
        (OSError("cannot identify image file"), "cannot identify image file"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "a file is damaged .*UnicodeDecodeError"),
        (zipfile.BadZipFile("File is not a zip file"), "a file is damaged .*not a zip"),
        (MemoryError("Unable to allocate 3 TiB"), "memory does not suffice .*3 TiB"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"), "memory does not suffice"),
        (ValueError("RESOURCE_EXHAUSTED: Error writing: No space left on device"), "^No space left on device"),
    ],
)
def test_what_comes_from_outside_is_told_from_the_librarys_own_errors(error, line, capfd, monkeypatch):
    def fail(*_):
        raise RuntimeError("a library hides it") from error

    assert re.search(line, outside_reason(error))
    monkeypatch.setattr(commands, "run", fail)
    status, told = outcome(capfd)
    log = pathlib.Path(re.search(r"\(details: (.*)\)$", told)[1])
    text = log.read_text()
    log.unlink()
    assert status == 2 and re.search(line.lstrip("^"), told) and "a library hides it" in text and "in fail" in text


def test_an_error_in_a_users_file_names_its_line(tmp_path, capfd, monkeypatch):
    """Also if a library that it calls raises it; a run that had begun can be resumed once it is corrected."""
    own = tmp_path / "own.py"
    own.write_text("import jax.numpy as jnp\n\n\ndef loss(x):\n    return jnp.reshape(x, (2,\n        2))\n")
    loss = run_file(own).loss
    monkeypatch.setattr(commands, "run", lambda *_: loss(jnp.ones(3)))
    status, told = outcome(capfd)
    place, log = re.fullmatch(r"error: TypeError in line 5 of (\S+): .*\(details: (.*)\)", told).groups()
    text = pathlib.Path(log).read_text()
    pathlib.Path(log).unlink()
    assert (status, place) == (2, str(own)) and "in loss" in text and "Traceback" in text
    line = rf"TypeError in line 5 of {own}: .*; the last checkpoint is kept, and"
    with pytest.raises(StoppedError, match=line), under_way.under_way(tmp_path):
        loss(jnp.ones(3))


def test_an_error_of_the_librarys_own_stays_a_traceback(monkeypatch):
    def fail(*_):
        try:
            raise FULL
        except OSError:  # handled, so not the cause
            raise TypeError("a slip of ours")  # noqa: B904

    monkeypatch.setattr(commands, "run", fail)
    assert outside_reason(KeyError("x")) is None
    with pytest.raises(TypeError, match="a slip"):
        launch.main([])


@pytest.mark.test_all
@pytest.mark.parametrize("listener", [WriteRecords, SaveCheckpoints])
def test_a_full_disk_stops_a_run_which_is_resumed_to_the_bit(stub_run, tmp_path, monkeypatch, capfd, listener):
    """The disk fills after two rounds, while records or a checkpoint are written."""
    reference, run = stub_run[0], tmp_path / "run"
    real, config = listener.take, make_stub_config(checkpoint_every=1)

    def take(self, turn):
        if turn.done == 3:
            raise FULL
        real(self, turn)

    monkeypatch.setattr(listener, "take", take)
    monkeypatch.setattr(commands, "run", lambda *_: train(config, run))
    assert launch.main([]) == 4
    line = capfd.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("stopped: runs/a/metrics.jsonl: No space left on device; the last checkpoint is kept")
    assert f"--workdir={run} --allow_code resumes" in line and f"details: {run / 'error.log'}" in line
    assert "in take" in (run / "error.log").read_text()
    assert Checkpoints(run / "checkpoints").rounds()[-1] == 2 and under_way.resume_command() is None
    monkeypatch.setattr(listener, "take", real)
    train(config, run)
    assert (run / "metrics.jsonl").read_bytes() == (reference / "metrics.jsonl").read_bytes()


def test_a_log_goes_where_there_is_room(tmp_path):
    try:
        raise FULL
    except OSError as error:
        assert commands.write_log(error, tmp_path) == tmp_path / "error.log"
        elsewhere = commands.write_log(error, tmp_path / "gone")
    assert elsewhere.exists() and elsewhere.parent != tmp_path
    elsewhere.unlink()


@pytest.mark.parametrize("command", ["train", "sweep", "predict", "profile", "report"])
def test_an_empty_flag_is_refused(command, capfd, tmp_path, monkeypatch):
    """An empty shell variable must not mean the current folder."""
    monkeypatch.chdir(tmp_path)
    name = next(name for name in ("workdir", "out") if name in launch.COMMANDS[command].flags)
    assert outcome(capfd, command, f"--{name}=")[0] == 2
    assert list(tmp_path.iterdir()) == []
    for seeds in ((), (0, 1)):
        with pytest.raises(UserError, match="is not a folder"):
            train(make_stub_config(seeds=seeds), "")


@pytest.mark.parametrize(
    "name, words",
    [("a/" + "x" * 300, "File name too long"), ("a\0b", "null (byte|character)"), ("file/run", "Not a directory")],
)
def test_a_workdir_that_cannot_be_is_noticed_before_anything_is_compiled(name, words, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("fedjax_ssl.run.train.compile_program", None)
    with pytest.raises(UserError, match=f"cannot write to the workdir .*{words}"):
        train(make_stub_config(), tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("text", ["def get_config(: pass", "1 / 0", "def get_config(): return {}['x']", "\xff = 1"])
def test_a_config_file_that_fails_is_one_line(text, tmp_path, capfd):
    path = tmp_path / "mine.py"
    path.write_bytes(text.encode("latin-1"))
    status, line = outcome(capfd, f"--config={path}", f"--workdir={tmp_path / 'run'}")
    assert status == 2 and str(path) in line and "Error" in line


def test_whoever_closes_the_output_sees_no_traceback():
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "launch.py"), "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    assert process.wait(60) == 141 and process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.parametrize("error", [FULL, UserError("images.npy has changed; put the old file back")])
def test_the_error_names_its_folder(error, tmp_path):
    """Also for users' mistakes, once a run has begun."""
    words = f"; the last .* --workdir={tmp_path} resumes"
    with pytest.raises(StoppedError, match=words) as caught, under_way.under_way(tmp_path):
        raise error
    assert caught.value.folder == tmp_path and caught.value.__cause__ is error
    with contextlib.suppress(KeyboardInterrupt), under_way.under_way(tmp_path, allow_code=True):
        raise KeyboardInterrupt
    assert under_way.resume_command() == f"python launch.py --workdir={tmp_path} --allow_code"
    with under_way.under_way(tmp_path):
        pass
    assert under_way.resume_command() is None


def test_a_full_disk_is_said_although_the_files_cannot_be_closed(tmp_path):
    """Closing a file tries to write the rest again."""
    run, line = tmp_path / "run", {"round": 1, **{f"figure_{number}": 0.5 for number in range(100)}}
    words = f"File too large; the last checkpoint is kept, and .* --workdir={run} resumes"
    closing = contextlib.closing(Workdir(run, make_stub_config().to_dict()))
    with files_of_at_most(50_000), pytest.raises(StoppedError, match=words), closing as folder:
        folder.begin(0)
        with under_way.under_way(run):
            for _ in range(100):
                folder.append(METRICS, [line])
    assert folder._files == {}
