"""Several hosts train one run: real processes on this machine against one process; where a process finds its place."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import orbax.checkpoint as ocp
import pytest

import launch
from conftest import ROOT
from fedjax_ssl.run import link
from fedjax_ssl.run.cluster import Place, find_place

CONFIG = """
import sys
sys.path.insert(0, "{tests}")
from conftest import SMALL, make_fedanchor_config

def get_config():
    less = {{"fedanchor.client_mixup": False, "fedanchor.contrastive": False, "server.epochs": 0}}
    config = make_fedanchor_config(num_rounds=6, **SMALL, **less)
    config.log.tensorboard = False
    return config
"""


@pytest.fixture
def train(tmp_path):
    """Starts a process for each of `happens` and waits for all: (statuses, what they said)."""
    (tmp_path / "tiny.py").write_text(CONFIG.format(tests=ROOT / "tests"))
    started = []

    def train(folder, *happens, devices=1):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": str(devices)}
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        processes = []
        for index, what in enumerate(happens):
            words = [what, f"--config={tmp_path / 'tiny.py'}", f"--workdir={folder}"]
            if len(happens) > 1:
                # Only the first may need the folder.
                words[2] = words[2] if index == 0 else f"--workdir={tmp_path / 'no_such_folder'}"
                words += [f"--coordinator=localhost:{port}", f"--num_processes={len(happens)}", f"--process_id={index}"]
            command = [sys.executable, str(ROOT / "tests" / "hosts_process.py"), *words]
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

    yield train
    for process in started:
        process.kill()
        process.communicate()


def last_state(folder):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(folder / "checkpoints" / "6" / "state")


def checkpoints_of(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def test_two_hosts_equal_two_devices_whatever_ends_them(train, tmp_path):
    """A run that goes from one process to two, of which one is killed and then the other, is stopped, and ended by one
    process; and a run that was never interrupted."""
    moved, whole = tmp_path / "moved", tmp_path / "whole"
    assert train(whole, "nothing", devices=2)[0] == [0]
    assert train(moved, f"2:{int(signal.SIGTERM)}", devices=2)[0] == [143]

    statuses, (first, second) = train(moved, "nothing", f"3:{int(signal.SIGKILL)}")
    assert statuses == [4, -signal.SIGKILL], first
    assert "clients train on 2 hosts, 2 devices (cpu)" in first and f"workdir {moved}, from round 2" in first
    gone = [line for line in first.splitlines() if "has gone" in line]
    assert gone == [
        "stopped: host 1 has gone: no word of it for 10 seconds; the last checkpoint is kept, and "
        f"--workdir={moved} resumes from it"
    ]
    assert "Traceback" not in first and "@" not in first  # nor the stack trace of a library
    assert checkpoints_of(moved) == [0, 2]

    statuses, (first, second) = train(moved, f"4:{int(signal.SIGKILL)}", "nothing")
    assert statuses == [-signal.SIGKILL, 4] and "from round 2" in first
    assert second.splitlines()[-1] == "stopped: host 0 has gone: no word of it for 10 seconds"
    assert "Traceback" not in second and "@" not in second

    statuses, (first, second) = train(moved, "nothing", f"4:{int(signal.SIGTERM)}")
    assert statuses == [143, 143], (first, second)
    assert "from round 2" in first and first.splitlines()[-1].endswith(f"--workdir={moved} resumes the run")
    # A process that writes nothing says only what happens to it.
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
        np.testing.assert_array_equal(states[0][name], value)  # two addends have but one sum
    assert np.load(moved / "partition.npz")["anchor_index"].tolist() == (
        np.load(whole / "partition.npz")["anchor_index"].tolist()
    )


def test_an_error_of_one_host_ends_the_other(train, tmp_path):
    statuses, (first, second) = train(tmp_path / "run", "nothing", "no_data")
    assert statuses == [2, 2]
    assert first.splitlines()[-1] == "host 1 has ended: error: the data are not here"
    assert second.splitlines()[-1] == "error: the data are not here"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words, said",
    [
        (["--process_id=0"], "--coordinator and --num_processes are missing"),
        (["--coordinator=a:1", "--num_processes=2"], "--process_id is missing"),
        (["--coordinator=a:1", "--num_processes=two", "--process_id=0"], "--num_processes is 'two'"),
        (["--coordinator=a:1", "--num_processes=0", "--process_id=0"], "--num_processes is 0"),
        (["--coordinator=a:1", "--num_processes=2", "--process_id=2"], "from 0 to 1"),
        (["--coordinator=a:1", "--num_processes=2", "--process_id=-1"], "from 0 to 1"),
        (["--coordinator=a", "--num_processes=2", "--process_id=0"], "--coordinator is 'a'; it must be HOST:PORT"),
        (["--coordinator=a:70000", "--num_processes=2", "--process_id=0"], "it must be HOST:PORT"),
        (["tune", "--process_id=0"], "--process_id=0: several hosts train one run together"),
        (["sweep", "x.py", "--num_processes=2"], "start the same command on each host"),
    ],
)
def test_a_place_that_makes_no_sense_is_one_line(words, said, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch.main(words) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "loading" not in line]
    assert line.startswith("error: ") and said in line and list(tmp_path.iterdir()) == []


def test_a_port_in_use_is_one_line(capfd, monkeypatch):
    monkeypatch.setattr(link, "PORT_SECONDS", 0.0)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert launch.main([f"--coordinator=localhost:{port}", "--num_processes=2", "--process_id=0"]) == 2
    assert f"error: process 0 cannot listen at port {port}: " in capfd.readouterr().err


def in_slurm(monkeypatch, **more):
    step = {
        "SLURM_JOB_ID": "4096",
        "SLURM_STEP_NODELIST": "node[07-09]",
        "SLURM_NTASKS": "6",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
        **more,
    }
    for name, value in step.items():
        monkeypatch.setenv(name, value)


def test_slurm_gives_a_process_its_place(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert find_place(None, None, None) is None
    in_slurm(monkeypatch)
    address = f"node07:{2**16 - 2**12}"
    assert find_place(None, None, None) == Place(address, 6, 3)
    assert find_place("here:1", 2, 0) == Place("here:1", 2, 0)  # what is said counts
    assert find_place(None, "1", None) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")  # of a host, for its two tasks
    assert find_place(None, None, None) == Place(address, 6, 3, [2, 3])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # SLURM has shared them out itself
    assert find_place(None, None, None) == Place(address, 6, 3)
    in_slurm(monkeypatch, SLURM_STEP_TASKS_PER_NODE="2,1(x4)", SLURM_LOCALID="0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert find_place(None, None, None) == Place(address, 6, 3)  # the only task of its host sees all
    in_slurm(monkeypatch, SLURM_NTASKS="1", SLURM_PROCID="0")
    assert find_place(None, None, None) is None
