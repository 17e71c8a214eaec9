"""Several hosts train one run: real processes on this machine compared with one process."""

import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading

import numpy as np
import orbax.checkpoint as ocp
import pytest

import launch
from fedjax_ssl import TrainingError, UserError, base_config
from fedjax_ssl.records.sealed import read_secret
from fedjax_ssl.records.workdir import SECRET
from fedjax_ssl.run import hosts
from fedjax_ssl.run.loop import Turn
from fedjax_ssl.run.machine import memory_limit
from fedjax_ssl.run.observe.listeners import HearSignals, StopOnSignal
from fedjax_ssl.run.signals import Signals
from tests.helpers.runs import ROOT

# Clients with labels, to test what happens to processes; FedMatch, whose server remembers the last uploads; noise.
CONFIGS = {
    "tiny": """
from tests.helpers.runs import make_tiny_config

def get_config():
    less = {"server.epochs": 0, "server.pretrain_epochs": 0, "log.tensorboard": False}
    return make_tiny_config(num_rounds=6, **less)
""",
    "fedmatch": """
from tests.helpers.runs import SMALL, make_fedanchor_config

def get_config():
    of_method = {"method": "fedmatch", "confidence.threshold": 0.15, "fedmatch.helper_interval": 2}
    less = {"model.normalisation": "running", "client.epochs": 1, "server.epochs": 0, "server.pretrain_epochs": 0}
    return make_fedanchor_config(clients_per_round=2, **SMALL, **of_method, **less, **{"log.tensorboard": False})
""",
    "private": """
from tests.helpers.stub import make_stub_config

def get_config():
    return make_stub_config(num_rounds=6, **{"privacy.noise": 1.0, "aggregation.clip_norm": 0.1})
""",
}


@pytest.fixture
def train(tmp_path, started):
    """Starts a process for each of `happens` and waits for all: (statuses, their output on stderr)."""
    for name, text in CONFIGS.items():
        (tmp_path / f"{name}.py").write_text(text)

    def train(folder, *happens, devices=1, config="tiny", more=()):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": str(devices)}
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        processes = []
        for index, what in enumerate(happens):
            words = [what, f"--config={tmp_path / config}.py", f"--workdir={folder}", *more]
            if len(happens) > 1:
                # Only host 0 may need the folder.
                words[2] = words[2] if index == 0 else f"--workdir={tmp_path / 'no_such_folder'}"
                words += [f"--coordinator=localhost:{port}", f"--num_processes={len(happens)}", f"--process_id={index}"]
            command = [sys.executable, str(ROOT / "tests" / "helpers" / "hosts_process.py"), *words]
            processes.append(subprocess.Popen(command, env=environment, **pipes))
        started.extend(processes)
        said = [None] * len(processes)

        def listen(index, process):
            with contextlib.suppress(subprocess.TimeoutExpired):
                said[index] = process.communicate(timeout=240)[1]

        threads = [threading.Thread(target=listen, args=pair) for pair in enumerate(processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [process.poll() for process in processes], said

    return train


def last_state(folder):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(folder / "checkpoints" / "6" / "default")


def checkpoints_of(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir() if path.is_dir())


@pytest.mark.test_all
def test_two_hosts_equal_two_devices_whatever_ends_them(train, tmp_path):
    """Compares with an uninterrupted run: of two processes one is killed, then the other; both are stopped; one process
    ends the run.
    """
    moved, whole = tmp_path / "moved", tmp_path / "whole"
    assert train(whole, "nothing", devices=2)[0] == [0]

    statuses, (first, second) = train(moved, "nothing", f"2:{int(signal.SIGKILL)}")
    assert statuses == [4, -signal.SIGKILL], first
    assert "clients train on 2 hosts, 2 devices (cpu)" in first and f"workdir {moved}\n" in first
    gone = [line for line in first.splitlines() if "has gone" in line]
    assert gone == [
        "stopped: host 1 has gone: no word of it for 4 seconds; the last checkpoint is kept, and "
        f"python launch.py --workdir={moved} --allow_code resumes from it"
    ]
    assert "Traceback" not in first and "@" not in first  # nor a library's stack trace
    assert checkpoints_of(moved) == [0, 2]

    statuses, (first, second) = train(moved, f"4:{int(signal.SIGKILL)}", "nothing")
    assert statuses == [-signal.SIGKILL, 4] and "from round 2" in first
    assert second.splitlines()[-1] == "stopped: host 0 has gone: no word of it for 4 seconds"
    assert "Traceback" not in second and "@" not in second

    statuses, (first, second) = train(moved, "nothing", f"3:{int(signal.SIGTERM)}")  # host 0 learns of it a turn later
    assert statuses == [143, 143], (first, second)
    assert "from round 2" in first
    assert first.splitlines()[-1].endswith(f"--workdir={moved} --allow_code resumes the run")
    # A process that writes no files reports only its own end.
    assert [line.partition(":")[0] for line in second.splitlines() if "loading" not in line][-2:] == [
        "SIGTERM",
        "stopped; host 0 says what is left",
    ]
    assert "round 4/6" not in second and not (tmp_path / "no_such_folder").exists()
    assert checkpoints_of(moved) == [2, 4]

    statuses, (alone,) = train(moved, "nothing", devices=2)
    assert statuses == [0] and "from round 4" in alone and "clients train on 2 devices (cpu)" in alone
    assert (moved / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    states = last_state(moved), last_state(whole)
    for name, value in states[1].items():
        np.testing.assert_array_equal(states[0][name], value)  # a sum of two addends does not depend on their order


@pytest.mark.test_all
def test_hosts_with_images_and_memory_of_clients_on_host_0(train, tmp_path):
    """Each client keeps its optimizer and the server its upload, in host 0's file; the run on two hosts is resumed."""
    runs, rounds = (tmp_path / "two", tmp_path / "one"), "--config.num_rounds="
    more = ("--config.residence.data=host", "--config.residence.clients=disk", "--config.client.persistent=true")
    for number in (3, 4):
        statuses, said = train(runs[0], "nothing", "nothing", config="fedmatch", more=(*more, f"{rounds}{number}"))
        assert statuses == [0, 0], said
    assert train(runs[1], "nothing", devices=2, config="fedmatch", more=(*more, f"{rounds}4"))[0] == [0]
    two, one = ((run / "metrics.jsonl").read_bytes() for run in runs)
    assert two == one
    rows = []
    for run in runs:
        with contextlib.closing(sqlite3.connect(run / "clients.sqlite")) as file:
            newest = "SELECT client, max(round), data FROM rows GROUP BY client ORDER BY client"
            rows.append(file.execute(newest).fetchall())
    assert rows[0] == rows[1] and len(rows[0]) > 5  # more clients than in a round, and the rows that all start with


@pytest.mark.test_all
def test_hosts_draw_the_noise_of_one_secret_that_nothing_shows(train, tmp_path):
    """Compares two hosts, whose run is resumed, with one process that trains all rounds again with their secret."""
    two, one = tmp_path / "two", tmp_path / "one"
    statuses, begun = train(two, "nothing", "nothing", config="private", more=("--config.num_rounds=2",))
    assert statuses == [0, 0], begun
    shutil.copytree(two, one)
    shutil.rmtree(one / "checkpoints" / "2")  # so that it goes on from the first state
    statuses, resumed = train(two, "nothing", "nothing", config="private")
    assert statuses == [0, 0] and "from round 2" in resumed[0], resumed
    statuses, alone = train(one, "nothing", devices=2, config="private")
    assert statuses == [0] and "from round" not in alone[0], alone
    assert (two / "metrics.jsonl").read_bytes() == (one / "metrics.jsonl").read_bytes()
    states = last_state(two), last_state(one)
    for name, value in states[1].items():
        np.testing.assert_array_equal(states[0][name], value)
    secret = read_secret(two)
    shown = (secret, secret.hex().encode(), np.frombuffer(secret, "<u4").astype("<i8").tobytes())
    files = [path for path in two.rglob("*") if path.is_file() and path.name != SECRET]
    texts = [*(path.read_bytes() for path in files), *(text.encode() for text in (*begun, *resumed))]
    assert len(files) > 10 and not any(form in text for text in texts for form in shown)


# A script instead of the command line: it ends by host 1's signal, or goes on after an error that all hosts share.
SCRIPT = """
import sys, time
from fedjax_ssl import TrainingError
from fedjax_ssl.run import hosts

address, index, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
try:
    with hosts.joined(address, 2, index):
        if what == "signal":
            time.sleep(1 - index)  # host 0 saves the state
            raise SystemExit(128 + hosts.any_signal(15 * index or None))
        raise TrainingError("the loss is not finite")
except TrainingError as error:
    time.sleep(3)  # longer than the service lives on
    print(error)
"""


@pytest.mark.parametrize("what, status, out", [("signal", 143, ""), ("error", 0, "the loss is not finite\n")])
@pytest.mark.test_all
def test_a_script_ends_as_it_would_alone(what, status, out, started):
    with socket.create_server(("", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    started += [subprocess.Popen([sys.executable, "-c", SCRIPT, address, str(i), what], **pipes) for i in (0, 1)]
    said = [process.communicate(timeout=120) for process in started]
    assert [(process.returncode, each[0]) for process, each in zip(started, said)] == [(status, out)] * 2, said
    assert "Traceback" not in said[0][1] + said[1][1]


class Others:
    """A link to a scripted other process."""

    def __init__(self, index, *says):
        self.count, self.index, self.stopping, self.done = 2, index, False, []
        self._says = list(says)

    def meet(self, text=""):
        self.done.append("meet")
        said = self._says.pop(0) if self._says else text
        return [text, said] if self.index == 0 else [said, text]

    def fail(self, error):
        self.done.append(f"fail {type(error).__name__}")

    def close(self):
        self.done.append("close")


@pytest.fixture
def meet_others(monkeypatch):
    """Makes this process number `index` of two; the other one says the given texts."""

    def meet_others(index, *says):
        others = Others(index, *says)
        monkeypatch.setattr(hosts, "_joined", others)
        monkeypatch.setattr(hosts, "HostLink", lambda *place: others)
        return others

    return meet_others


@pytest.mark.parametrize("error, agreed, done", [
    (TrainingError("diverged"), "", ["meet", "close"]),
    (SystemExit(143), "15", ["meet", "close"]),
    (SystemExit(143), "", ["fail SystemExit"]),  # the other host does not know of it
    (UserError("no data"), "15", ["fail UserError"]),
])  # fmt: skip
def test_what_all_have_come_to_is_no_error_of_one(meet_others, error, agreed, done):
    others = meet_others(0, f"checksum {hosts.checksum_of_library()[:8]}", agreed)
    with pytest.raises(type(error)), hosts.joined("here:1", 2, 0):
        hosts.any_signal(None)
        raise error
    assert others.done == ["meet", "meet", *done]


@pytest.mark.parametrize("other, expected", [("4096", 4096), ("9" * 20, None), ("", None)])
def test_hosts_plan_with_the_smallest_memory(meet_others, other, expected):
    alone = memory_limit()
    others = meet_others(0, other)
    assert memory_limit() == (expected or alone)
    assert others.done == ["meet"]


def test_a_signal_counts_when_all_know_of_it(meet_others):
    meet_others(0, "", "", "")
    signals = Signals()
    hear, stop = HearSignals(signals), StopOnSignal(signals)
    turn = Turn(3, False, None, [[]], [[]], [True])
    hear.take(turn)
    signals.received = signal.SIGTERM  # after the meeting: the other host begins the next dispatch
    assert signals.agreed is None
    stop.take(turn)
    hear.take(turn)
    assert signals.agreed == signal.SIGTERM
    with pytest.raises(SystemExit, match="143"):
        stop.take(turn)

    signals = Signals()
    stop = StopOnSignal(signals)
    signals.received = signal.SIGTERM
    with pytest.raises(SystemExit, match="143"):  # no turn follows the last
        stop.take(turn._replace(is_last=True))


def test_other_files_of_the_library_are_one_line(meet_others):
    others = meet_others(1, "checksum 00000000")
    with pytest.raises(UserError, match="the library's files of host 1 differ"), hosts.joined("here:1", 2, 1):
        raise AssertionError("they are not refused")
    assert others.done == ["meet", "fail UserError"]


@pytest.mark.parametrize("field, name", [("method", "own.py:mine"), ("model.name", "own:Mine")])
def test_host_0_names_no_code_that_a_process_does_not_name(meet_others, tmp_path, monkeypatch, field, name):
    (tmp_path / "own.py").write_text("Mine = None\ndef mine(problem): raise AssertionError\n")
    monkeypatch.chdir(tmp_path)
    told = base_config()
    told.update_from_flattened_dict({field: name})
    text = json.dumps(told.to_dict())
    meet_others(1, text)
    with pytest.raises(UserError, match=f"host 0 names code, {field}={name}, which would be run; .*--allow_code"):
        hosts.config_of_first(base_config)
    meet_others(1, json.dumps(base_config().to_dict()))
    assert hosts.config_of_first(lambda: told, is_given=False) == base_config()

    monkeypatch.setattr(hosts, "joined", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr("fedjax_ssl.train", lambda config, workdir: None)
    for words, status in {(): 2, ("--allow_code",): 0, (f"--config.{field}={name}",): 0}.items():
        meet_others(1, text)
        assert launch.main([f"--workdir={tmp_path / 'no_such_folder'}", *words]) == status


def test_another_configuration_is_one_line(meet_others):
    """Fields that change no result may differ."""
    told, other, same = base_config(), base_config(), base_config()
    other.client.learning_rate, same.checkpoint_every = 7.0, 99
    text = json.dumps(told.to_dict())
    meet_others(1, text)
    with pytest.raises(UserError, match=r"not that of host 0 \(client.learning_rate: 7.0, not [0-9.]+\)$"):
        hosts.config_of_first(lambda: other)
    meet_others(1, text)
    assert hosts.config_of_first(lambda: same) == told


@pytest.mark.test_all
def test_an_error_of_one_host_ends_the_other(train, tmp_path):
    statuses, (first, second) = train(tmp_path / "run", "nothing", "no_data")
    assert statuses == [2, 2]
    assert first.splitlines()[-1] == "host 1 has ended: error: the data are not here"
    assert second.splitlines()[-1] == "error: the data are not here"
    assert not (tmp_path / "run").exists()


@pytest.mark.test_all
def test_hosts_with_other_programs_end_before_they_run_them(train, tmp_path):
    statuses, said = train(tmp_path / "run", "nothing", "other_program")
    assert statuses == [2, 2]
    for each in said:
        assert "the programs of host 1 differ from those of host 0: the rounds with checksum" in each.splitlines()[-1]
    assert not (tmp_path / "run").exists()
