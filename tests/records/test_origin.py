"""A run's origin: its code, command and machine are written down, and changed code is named."""

import hashlib
import importlib.metadata
import json
import shlex
import shutil
import socket
import subprocess
import sys

import pytest

from fedjax_ssl import train
from fedjax_ssl.config import load_config_file
from fedjax_ssl.records import origin
from fedjax_ssl.records.runs import read_run
from fedjax_ssl.records.sealed import write_sealed
from fedjax_ssl.report.model_card import model_card
from tests.helpers.runs import ROOT
from tests.helpers.stub import make_stub_config


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
def run(stub_run, tmp_path):
    shutil.copytree(stub_run[0], tmp_path / "run")
    return tmp_path / "run"


def rewritten(run, **changes):
    """Changes the only start in a run's origin.json."""
    (start,) = origin.read_starts(run)
    write_sealed(run / "origin.json", {"starts": [{**start._asdict(), **changes}]})


def test_a_run_says_where_it_comes_from(stub_run):
    folder = stub_run[0]
    (start,) = origin.read_starts(folder)
    assert start.host == socket.gethostname() and start.python == sys.version.split()[0]
    assert start.command.endswith(shlex.join(sys.argv[1:])) and start.command
    assert start.start <= start.end and start.start.endswith("+00:00")
    assert start.packages["jax"] == importlib.metadata.version("jax") and "fedjax_ssl" in start.packages
    summary = json.loads((folder / "summary.json").read_text())
    for name in ("command", "commit", "dirty", "start", "end", "host", "processor", "packages"):
        assert summary[name] == getattr(start, name)
    assert summary["commit"] == (git(ROOT, "rev-parse", "HEAD") if (ROOT / ".git").exists() else None)


def test_a_diff_is_kept_beside_the_run_and_a_clean_checkout_has_none(repository, tmp_path, monkeypatch):
    look = origin.repository.__wrapped__
    assert look(repository / "package") == (git(repository, "rev-parse", "HEAD"), b"")
    (repository / "package" / "__init__.py").write_text("one = 2\n")
    commit, diff = look(repository / "package")
    assert b"-one = 1\n+one = 2\n" in diff
    monkeypatch.setattr(origin, "repository", lambda package: (commit, diff))
    origin.note_start(tmp_path)
    (start,) = origin.read_starts(tmp_path)
    digest = hashlib.sha256(diff).hexdigest()
    assert start.dirty and start.diff == digest and start.commit == commit
    copy = tmp_path / "origin" / f"{digest[:12]}-changes.diff"
    assert copy.read_bytes() == diff and copy.name in start.code()


def test_the_commit_is_of_the_current_folder_or_none(repository, tmp_path, monkeypatch):
    look = origin.repository.__wrapped__
    monkeypatch.chdir(tmp_path)
    assert look(tmp_path) == (None, b"")
    monkeypatch.chdir(repository)
    assert look(tmp_path)[0] == git(repository, "rev-parse", "HEAD")
    monkeypatch.setenv("PATH", str(tmp_path))  # without git
    assert look(repository / "package") == (None, b"")


def test_the_users_own_files_are_copied_with_their_hashes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "def get_config(): return 1\n"
    (tmp_path / "my_config_of_today.py").write_text(text)
    assert load_config_file("my_config_of_today.py") == 1
    try:
        origin.note_start(tmp_path)
        rewritten(tmp_path, files={"my_config_of_today.py": "another"})
        assert origin.what_differs(tmp_path) == "my_config_of_today.py"
    finally:
        del sys.modules[next(name for name in sys.modules if "my_config_of_today" in name)]
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert (tmp_path / "origin" / f"{digest[:12]}-my_config_of_today.py").read_text() == text
    assert str(tmp_path) not in (tmp_path / "origin.json").read_text()  # no path of this machine


def test_a_run_resumed_with_other_code_says_in_a_line_what_differs(run, capfd):
    (start,) = origin.read_starts(run)
    assert origin.what_differs(run) == ""
    rewritten(run, commit="0" * 40, library="another", packages={**start.packages, "jax": "0.1.2"})
    shutil.rmtree(run / "checkpoints" / "4")
    train(make_stub_config(), run)
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


@pytest.mark.parametrize("text", ["", '{"starts": []}', '[{"command": 3}]'])
def test_a_damaged_file_is_as_none(text, run):
    (run / "origin.json").write_text(text)
    assert origin.read_starts(run) == [] and origin.what_differs(run) == ""
    assert "| code |" not in model_card(read_run(run))


def test_the_card_names_code_and_command_and_neither_is_markup(run):
    rewritten(run, command="launch.py <b>|`\x1b[2J", host="me <script>")
    card = model_card(read_run(run))
    assert f"| code | fedjax_ssl {origin.packages()['fedjax_ssl']}" in card
    assert "&lt;b&gt;\\|\\`\\\\x1b\\[2J" in card and "<b>" not in card
