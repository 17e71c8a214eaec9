"""A run's origin: its code, command and machine are written down, and changed code is named."""

import hashlib
import importlib.metadata
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import types
from unittest import mock

import pytest

from fedjax_ssl import train
from fedjax_ssl.config import load_config_file
from fedjax_ssl.records import origin
from fedjax_ssl.records.runs import read_run
from fedjax_ssl.report import page, run_report
from fedjax_ssl.report.model_card import model_card
from tests.helpers.runs import ROOT, make_tiny_config

pytestmark = pytest.mark.usefixtures("quick_runs")


def git(folder, *words):
    names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """A repository with one commit of one package."""
    folder = tmp_path / "repository"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "__init__.py").write_text("one = 1\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


@pytest.fixture
def run(finished_run, tmp_path):
    shutil.copytree(finished_run[0], tmp_path / "run")
    return tmp_path / "run"


def test_a_run_says_where_it_comes_from(finished_run):
    folder = finished_run[0]
    (start,) = origin.read_starts(folder)
    assert start.host == socket.gethostname() and start.python == sys.version.split()[0]
    assert start.command.endswith(shlex.join(sys.argv[1:])) and start.command
    assert start.start <= start.end and start.start.endswith("+00:00")
    real = {re.sub("[-_.]+", "_", found.metadata["Name"]).lower(): found.version
            for found in importlib.metadata.distributions()}  # fmt: skip
    assert start.packages == real and start.packages["jax"] in real.values()
    summary = json.loads((folder / "summary.json").read_text())
    for name in ("command", "commit", "dirty", "start", "end", "host", "processor", "packages"):
        assert summary[name] == getattr(start, name)
    if (ROOT / ".git").exists():
        assert summary["commit"] == git(ROOT, "rev-parse", "HEAD")
    else:
        assert summary["commit"] is None


def test_a_diff_is_kept_beside_the_run_and_a_clean_checkout_has_none(repository, tmp_path):
    found = origin._repository(repository / "package", tmp_path)
    assert found.commit == git(repository, "rev-parse", "HEAD") and found.diff == b""
    assert found.tracked == {str(repository / "package" / "__init__.py")}
    (repository / "package" / "__init__.py").write_text("one = 2\n")
    changed = origin._repository(repository / "package", tmp_path)
    assert changed.commit == found.commit and b"-one = 1\n+one = 2\n" in changed.diff
    with mock.patch.object(origin, "look") as look:
        look().result.return_value = changed
        origin.note_start(tmp_path)
        (start,) = origin.read_starts(tmp_path)
    digest = hashlib.sha256(changed.diff).hexdigest()
    assert not [name for name in start.files if "fedjax_ssl/" in name]  # they are in another repository
    assert start.dirty and start.diff == digest
    copy = tmp_path / "origin" / f"{digest[:12]}-changes.diff"
    assert copy.read_bytes() == changed.diff and copy.name in start.code()


def test_an_installed_package_is_of_the_repository_of_the_current_folder(repository, tmp_path):
    installed = repository / "venv" / "package"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    (repository / ".gitignore").write_text("venv\n")
    assert origin._repository(installed, tmp_path) == origin._Repository()
    assert origin._repository(installed, repository).commit == git(repository, "rev-parse", "HEAD")


def test_without_a_repository_or_git_the_commit_is_none(repository, tmp_path, monkeypatch):
    assert origin._repository(tmp_path, tmp_path).commit is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert origin._repository(repository / "package", repository) == origin._Repository()


def test_a_current_folder_that_is_gone_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    made = types.ModuleType("made_at_run_time")
    made.__file__ = "_ops.py"  # as PyTorch's torch.ops does
    monkeypatch.setitem(sys.modules, "made_at_run_time", made)
    origin.note_start(tmp_path / "run")
    assert len(origin.read_starts(tmp_path / "run")) == 1


def test_a_repository_runs_no_program_of_its_own(repository, tmp_path):
    for name in ("diff.external", "core.fsmonitor", "diff.python.textconv"):
        git(repository, "config", name, f"touch {tmp_path / 'ran'}; false")
    (repository / ".gitattributes").write_text("*.py diff=python\n")
    (repository / "package" / "__init__.py").write_text("one = 2\n")
    assert b"+one = 2" in origin._repository(repository / "package", tmp_path).diff
    assert not (tmp_path / "ran").exists()


def test_the_users_own_files_are_copied_with_their_hashes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "def get_config(): return 1\n"
    (tmp_path / "my_config_of_today.py").write_text(text)
    assert load_config_file("my_config_of_today.py") == 1
    try:
        origin.note_start(tmp_path)
    finally:
        del sys.modules[next(name for name in sys.modules if "my_config_of_today" in name)]
    (start,) = origin.read_starts(tmp_path)
    digest = start.files["my_config_of_today.py"]
    assert digest == hashlib.sha256(text.encode()).hexdigest()
    assert (tmp_path / "origin" / f"{digest[:12]}-my_config_of_today.py").read_text() == text
    assert str(tmp_path) not in (tmp_path / "origin.json").read_text()  # no path of this machine


def test_a_run_resumed_with_other_code_says_in_a_line_what_differs(run, capfd):
    (start,) = origin.read_starts(run)
    assert origin.what_differs(run) == ""
    other = {"commit": "0" * 40, "library": "another", "packages": {**start.packages, "jax": "0.1.2", "pytest": "1"}}
    (run / "origin.json").write_text(json.dumps([{**start._asdict(), **other}]))
    shutil.rmtree(run / "checkpoints" / "4")
    train(make_tiny_config(), run)
    lines = [line for line in capfd.readouterr().err.splitlines() if "other code" in line]
    here = (start.commit or "none")[:12]
    assert lines == [
        "warning: other code trained this run before (the library: commit 000000000000 there, "
        f"{here} here; jax 0.1.2 there, {start.packages['jax']} here)"
    ]
    first, second = origin.read_starts(run)
    assert first.packages["jax"] == "0.1.2" and second.library == start.library and second.end


@pytest.mark.parametrize(
    "program, typed",
    [("/a/fedjax_ssl/__main__.py", "python -m fedjax_ssl"), ("/a/bin/fedjax-ssl", "fedjax-ssl"), ("", "python")],
)
def test_the_command_can_be_typed_again(monkeypatch, tmp_path, program, typed):
    monkeypatch.setattr(sys, "argv", [program, "report", "a run"])
    origin.note_start(tmp_path)
    assert origin.read_starts(tmp_path)[0].command == f"{typed} report 'a run'"


@pytest.mark.parametrize("text", ["", "{", "3", "[3, null, {}]", '{"a": 1}', '[{"command": 3}]'])
def test_a_damaged_file_is_as_none(text, run):
    (run / "origin.json").write_text(text)
    assert origin.read_starts(run) == [] and origin.what_differs(run) == ""
    assert "| code |" not in model_card(read_run(run))


def test_fields_of_another_kind_are_refused(run):
    (start,) = (each._asdict() for each in origin.read_starts(run))
    for name in start:
        (run / "origin.json").write_text(json.dumps([{**start, name: [1]}]))
        assert origin.read_starts(run) == [], name


def test_the_report_and_the_card_name_code_and_command_and_neither_is_markup(run):
    (start,) = origin.read_starts(run)
    hostile = start._replace(command="launch.py <b>|`\x1b[2J", host="me <script>")
    (run / "origin.json").write_text(json.dumps([hostile._asdict()]))
    card = model_card(read_run(run))
    assert f"| code | fedjax_ssl {start.packages['fedjax_ssl']}" in card
    assert "&lt;b&gt;\\|\\`\\\\x1b\\[2J" in card and "<b>" not in card and "me &lt;" not in card
    page.write_page(run / "page.html", "", "", run_report._origin(read_run(run)))
    text = (run / "page.html").read_text()
    assert "launch.py &lt;b&gt;|`\\x1b[2J" in text and "me &lt;script&gt;" in text
