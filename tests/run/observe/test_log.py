"""A run's messages: stderr has as much as asked for, run.log everything."""

import os
import re
import sys

import pytest

import launch
from fedjax_ssl.run.observe import clock, log
from fedjax_ssl.run.observe.progress import RoundProgress
from tests.helpers.runs import files_of_at_most


@pytest.fixture(autouse=True)
def clean():
    log.begin()
    yield
    log.set_level(log.NORMAL)
    log.begin()


@pytest.mark.parametrize("level, shown", [
    (log.QUIET, ["warning: hot"]),
    (log.NORMAL, ["usual", "warning: hot"]),
    (log.VERBOSE, ["usual", "detail", "warning: hot"]),
])  # fmt: skip
def test_levels_choose_what_is_shown_and_the_file_has_all(level, shown, tmp_path, capfd):
    log.set_level(level)
    log.say("usual")
    with log.logged([tmp_path / "run.log"]):
        log.say("detail", log.VERBOSE)
        log.warn("hot")
    assert capfd.readouterr().err.splitlines() == shown
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert [line[20:] for line in lines] == ["usual", "detail", "warning: hot"]
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)


def test_each_file_has_what_came_before_once(tmp_path):
    log.note("of an earlier run")
    log.begin()
    log.note("before")
    for name in ("a", "b", "a"):
        with log.logged([tmp_path / name]):
            log.note(f"in {name}")
    said = {name: [line[20:] for line in (tmp_path / name).read_text().splitlines()] for name in ("a", "b")}
    assert said == {"a": ["before", "in a", "in a"], "b": ["before", "in b"]}


def test_what_ended_a_run_is_its_last_line(tmp_path):
    with pytest.raises(ValueError), log.logged([tmp_path / "run.log"]):
        raise ValueError("not finite\nmore")
    assert (tmp_path / "run.log").read_text().endswith(" ended by ValueError: not finite\n")


def test_a_full_disk_does_not_end_the_run(tmp_path):
    with files_of_at_most(20), log.logged([tmp_path / "run.log"]):
        log.note("more than there is room for")
    assert len((tmp_path / "run.log").read_text()) == 20


def test_a_quiet_clock_and_quiet_progress_show_nothing(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(clock, "FIRST_LINE_SECONDS", 0.0)
    log.set_level(log.QUIET)
    with log.logged([tmp_path / "run.log"]), RoundProgress(4, 0) as progress, clock.doing("work"):
        log.say("workdir")
        progress.update({"round": 4, "test_accuracy": 0.5})
        log.warn("slow")
    assert capfd.readouterr().err == "warning: slow\n"
    assert [line[20:] for line in (tmp_path / "run.log").read_text().splitlines()] == [
        "workdir", "round 4/4  test 50.00 %", "warning: slow"
    ]  # fmt: skip


def test_a_reader_that_has_ended_does_not_end_the_run(tmp_path, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=1) as gone, log.logged([tmp_path / "run.log"]):
        monkeypatch.setattr(sys, "stderr", gone)
        log.say("workdir")
        with RoundProgress(4, 0) as progress:
            log.say("round 1/4")
            progress.update({"round": 4, "test_accuracy": 0.5})
        assert launch.main(["sweep"]) == 2
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)  # takes what Python still holds
    lines = [line[20:] for line in (tmp_path / "run.log").read_text().splitlines()]
    assert lines == ["workdir", "round 1/4", "round 4/4  test 50.00 %"]


def test_a_runs_folder_has_its_log(stub_run):
    lines = [line[20:] for line in (stub_run[0] / "run.log").read_text().splitlines()]
    assert f"workdir {stub_run[0]}" in lines and any(line.startswith("round 4/4") for line in lines)
    assert any(line.startswith("checkpoint of round 4 in") for line in lines)


def test_the_words_are_for_every_command_and_the_last_one_counts(capfd):
    assert launch.main(["sweep", "--quiet"]) == 2 and "which sweep?" in capfd.readouterr().err
    assert not log.shows(log.NORMAL)
    assert launch.main(["--verbose", "--workdir="]) == 2 and log.shows(log.VERBOSE)
    assert launch.main(["--verbose", "--quiet", "--workdir="]) == 2 and not log.shows(log.NORMAL)
