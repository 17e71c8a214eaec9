"""Sweeps: the same table after an interruption, and failures that stop no other run."""

import csv
import json
import os
import pathlib
import queue
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import launch
from fedjax_ssl.base.errors import BusyError, TrainingError
from fedjax_ssl.base.files import replace_file
from fedjax_ssl.base.imports import run_file
from fedjax_ssl.records.groups import read_groups
from fedjax_ssl.run.under_way import under_way
from fedjax_ssl.sweep import load_sweep, plan, run_sweep, work
from tests.helpers.runs import ROOT, pretended


@pytest.fixture(scope="module")
def tables():
    """The seeds that each row of `finished_sweep` had whenever its table was written."""
    return []


@pytest.fixture(scope="module")
def finished_sweep(sweep_file, tmp_path_factory, tables):
    workdir = tmp_path_factory.mktemp("finished_sweep")

    def note(path, text):
        replace_file(path, text)
        if path.name == "table.csv":
            tables.append([f"{row['seeds']} of {row['seeds planned']}" for row in csv.DictReader(path.open())])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedjax_ssl.report.look.replace_file", note)
        run_sweep(sweep_file, workdir)
    return workdir


def test_the_table_grows_by_every_seed(finished_sweep, tables):
    grown = [[f"{first} of 3", f"{second} of 3"] for first, second in [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2), (3, 3)]]
    assert tables[: len(grown)] == grown and all(table == grown[-1] for table in tables[len(grown) :])


def test_a_dry_run_tells_runs_of_another_configuration(finished_sweep, sweep_file, capsys):
    run_sweep(sweep_file, finished_sweep, dry_run=True)
    assert capsys.readouterr().out.count("  finished") == 6
    run_sweep(sweep_file, finished_sweep, ["--config.client.learning_rate=0.5"], dry_run=True)
    assert capsys.readouterr().out.count("  a run of another configuration (client.learning_rate); remove it") == 6


def test_the_table_says_what_the_runs_say(finished_sweep):
    rows, runs = (list(csv.DictReader((finished_sweep / name).open())) for name in ("table.csv", "table_runs.csv"))
    markdown, latex = ((finished_sweep / name).read_text() for name in ("table.md", "table.tex"))
    assert len(runs) == 6
    assert [row["method"] for row in rows] == ["Stub", "Revealed (labels revealed)"]
    for row, name in zip(rows, ("Stub", "Revealed")):
        folders = sorted((finished_sweep / name / "server_labels=40").glob("seed_*"))
        summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
        assert [summary["seed"] for summary in summaries] == [0, 1, 2]
        assert (row["seeds"], row["seeds planned"], row["seeds unfinished"]) == ("3", "3", "0")
        accuracies = [100 * summary["test_accuracy"] for summary in summaries]
        assert float(row["test accuracy"]) == pytest.approx(np.mean(accuracies))
        assert float(row["test accuracy std"]) == pytest.approx(np.std(accuracies, ddof=1))
        shown = f"{np.mean(accuracies):.2f} ± {np.std(accuracies, ddof=1):.2f}"
        assert shown in markdown and shown in latex
        each = [line for line in runs if line["method"] == row["method"]]
        assert [(line["seed"], line["finished"], line["data.server_labels"]) for line in each] == [
            (str(seed), "1", "40") for seed in range(3)
        ]
        assert [float(line["test accuracy"]) for line in each] == pytest.approx(accuracies)
        assert [float(line["MB up"]) for line in each] == pytest.approx([s["bytes_up"] / 1e6 for s in summaries])
        assert all(summary["labels_revealed"] == (name == "Revealed") for summary in summaries)
    page = (finished_sweep / "report.html").read_text()
    assert "2 configurations, 6 runs" in page and "Stub/server labels=40" in page


def test_a_report_of_a_sweep_has_its_names_and_its_order(finished_sweep, tmp_path):
    def names(folder):
        return [group.name for group in read_groups([folder])[0]]

    rows = ["Stub/server labels=40", "Revealed/server labels=40"]
    assert names(finished_sweep) == rows
    copy = shutil.copytree(finished_sweep, tmp_path / "copy")
    shutil.copytree(copy / "Stub", copy / "tries" / "Stub_try_0")
    assert len(read_groups([copy])[0]) == 3  # a page of the sweep leaves this out
    assert [group.name for group in read_groups([copy], rows_alone=True)[0]] == rows
    shutil.rmtree(copy / "tries")
    renamed = dict(zip(json.loads((copy / "rows.json").read_text()), ["Ours, with \x1b", "Revealed"]))
    (copy / "rows.json").write_text(json.dumps(renamed))
    assert names(copy) == ["Ours, with \\x1b", "Revealed"]
    for damaged in ("[", "[1]", '{"Stub/server_labels=40": 3}'):
        (copy / "rows.json").write_text(damaged)
        assert names(copy) == rows[::-1]


def test_the_seeds_that_are_left_of_a_row_are_trained_together(sweep_file, tmp_path, monkeypatch):
    trained = []

    def train(config, folder, on_finish, root):
        trained.append((folder.parent.name, config.seeds))
        raise BusyError(folder / f"seed_{config.seeds[0]}")  # so that there is nothing to read

    monkeypatch.setattr(work, "train", train)
    monkeypatch.setattr(work, "is_finished", lambda cell, seed: (cell.name, seed) == ("Stub", 0))
    for cell in plan(load_sweep(sweep_file), tmp_path):
        work.work_on(cell, tmp_path, lambda: None, "")
    assert trained == [("Stub", (1, 2)), ("Revealed", (0, 1, 2))]


def test_a_seed_that_another_process_took_meanwhile_keeps_nobody_from_the_rest(sweep_file, tmp_path, monkeypatch):
    """Of three seeds another process takes the second; the first and the third are done here."""
    (cell, *_), asked, done = plan(load_sweep(sweep_file), tmp_path), [], set()

    def train(config, *_):
        asked.append(config.seeds)
        for seed in config.seeds:
            if seed == 1:
                raise BusyError(cell.folder / "seed_1")
            done.add(seed)

    monkeypatch.setattr(work, "train", train)
    monkeypatch.setattr(work, "is_finished", lambda cell, seed: seed in done)
    assert work._run_cell(cell, (0, 1, 2), tmp_path, lambda: None) == {}
    assert asked == [(0, 1, 2), (1,), (2,)] and done == {0, 2}
    asked.clear()
    assert work._run_cell(cell, (1, 3), tmp_path, lambda: None) == {}
    assert asked == [(1, 3)]  # the process that has the first seed does the others, too


@pytest.mark.test_all
def test_two_processes_share_a_sweep_and_one_is_killed(finished_sweep, sweep_file, tmp_path, capsys):
    """Both start with the first run. The later process takes the second row, or the next run of the first row if one is
    done, and is killed (SIGKILL) in the middle. The other ends the sweep: every run is done once, and the table is that
    of a single process.
    """
    shared = tmp_path / "shared"
    command = [sys.executable, str(ROOT / "launch.py"), "sweep", sweep_file, f"--workdir={shared}"]
    quiet = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    processes = [subprocess.Popen(command, **quiet) for _ in range(2)]
    said, begun, word = [[], []], queue.SimpleQueue(), "workdir "

    def listen(index):
        for line in processes[index].stderr:
            said[index].append(line.rstrip())
            if line.startswith(word):
                begun.put(index)

    def dry_run(*flags):
        capsys.readouterr()
        assert launch.main(["sweep", sweep_file, f"--workdir={shared}", "--dry_run", *flags]) == 0
        return [line.split()[-1] for line in capsys.readouterr().out.splitlines()]

    listeners = [threading.Thread(target=listen, args=(index,)) for index in range(2)]
    try:
        for listener in listeners:
            listener.start()
        first = begun.get(timeout=240)
        processes[first].send_signal(signal.SIGSTOP)  # however slow the other process is
        other = 1 - first
        while begun.get(timeout=240) == first:  # its output before the stop
            pass
        processes[other].kill()
        (killed,) = [line.removeprefix(word) for line in said[other] if line.startswith(word)]
        assert not (pathlib.Path(killed) / "summary.json").exists()
        left = dry_run()
        assert set(left) <= {"finished", "do"} and left.count("do") >= 4  # including the begun runs
        processes[first].send_signal(signal.SIGCONT)
        assert processes[first].wait(timeout=240) == 0, said[first]
    finally:
        for process in processes:
            process.kill()
        for listener in listeners:
            listener.join()
    left = [line for line in said[other] if "left to another process" in line]
    # At most once: a process that is too late for a whole row goes on to the next row.
    assert left in ([], ["Stub, data.server_labels 40: left to another process"])
    assert left or "Revealed" not in killed
    done = [line.removeprefix(word).partition(",")[0] for line in said[first] if line.startswith(word)]
    runs = sorted(path.parent for path in shared.rglob("config.json"))
    # Including the killed run, from its start.
    assert sorted(map(pathlib.Path, done)) == runs and len(runs) == 6, said
    for run in runs:
        same = finished_sweep / run.relative_to(shared)
        assert (run / "metrics.jsonl").read_bytes() == (same / "metrics.jsonl").read_bytes()
    assert dry_run() == ["finished"] * 6
    assert dry_run("--rows=None;St*") == ["finished"] * 3
    assert launch.main(["sweep", sweep_file, f"--workdir={shared}", "--rows=stub"]) == 2
    assert "no row 'stub'; its rows: Stub; Revealed" in capsys.readouterr().err
    tables = [list(csv.DictReader((folder / "table.csv").open())) for folder in (finished_sweep, shared)]
    for table in tables:
        for row in table:
            row.pop("seconds"), row.pop("seconds std")
    assert tables[0] == tables[1]


def test_a_run_that_fails_is_reported_and_the_others_go_on(sweep_file, tmp_path, monkeypatch, capsys):
    """An error in a user's file names its line."""
    own = tmp_path / "own.py"
    own.write_text("def loss():\n    return 1 / 0\n")
    loss = run_file(own).loss

    def train(config, folder, on_finish, root):
        if 0 in config.seeds and folder.parent.name == "Stub":
            raise TrainingError("no luck")
        if 1 in config.seeds and folder.parent.name == "Stub":
            loss()
        for seed in config.seeds:
            pretended(folder, config, seed)

    monkeypatch.setattr(work, "train", train)
    assert launch.main(["sweep", sweep_file, f"--workdir={tmp_path}"]) == 3
    errors = capsys.readouterr().err
    assert "failed: Stub, data.server_labels 40, seed 0: TrainingError: no luck" in errors
    assert f"seed 1: ZeroDivisionError in line 2 of {own}: division by zero" in errors and "2 of 6 runs" in errors
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert [(row["seeds"], row["seeds planned"]) for row in rows] == [("1", "3"), ("3", "3")]


@pytest.mark.parametrize(("number", "status"), [(28, 4), (12, 3)])
def test_a_full_disk_ends_the_sweep_and_too_little_memory_does_not(
    number, status, sweep_file, tmp_path, monkeypatch, capsys
):
    tried = []

    def train(config, folder, on_finish, root):
        tried.append((folder.parent.name, *config.seeds))
        with under_way(folder):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(work, "train", train)
    assert launch.main(["sweep", sweep_file, f"--workdir={tmp_path}"]) == status
    errors = capsys.readouterr().err
    if status == 4:
        assert tried == [("Stub", 0, 1, 2)]
        assert "stopped: No space left on device; the same command resumes the sweep (details: " in errors
    else:  # a single seed or another method may need less
        assert len(tried) == 8 and "6 of 6 runs" in errors


def test_a_failure_is_not_forgotten_when_another_process_takes_a_later_seed(sweep_file, tmp_path, monkeypatch, capsys):
    def train(config, folder, on_finish, root):
        if config.seeds == (1,) and folder.parent.name == "Stub":
            raise BusyError(folder / "seed_1")
        raise TrainingError("no luck")

    monkeypatch.setattr(work, "train", train)
    (tmp_path / "Stub" / "server_labels=40" / "seed_0").mkdir(parents=True)
    (tmp_path / "Stub" / "server_labels=40" / "seed_0" / "summary.json").write_text("{}")  # an incomplete run
    assert launch.main(["sweep", sweep_file, f"--workdir={tmp_path}"]) == 3
    errors = capsys.readouterr().err
    assert "5 of 6 runs" in errors and errors.count("left to another process") == 1
