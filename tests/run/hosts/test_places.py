"""A process finds its place among those of a run, or says in a line why it has none."""

import os
import socket
import subprocess
import sys
import threading

import jax
import pytest
from jax._src import distributed

import launch
from fedjax_ssl import UserError
from fedjax_ssl.run import hosts
from fedjax_ssl.run.hosts import link
from tests.helpers.runs import ROOT


@pytest.mark.parametrize("places, wrong, said", [
    (["1 2", "1 2"], 1, "two processes have --process_id=1"),  # the other one goes on
    (["1 3"], 2, "the processes were started with --num_processes=2 and 3"),
])  # fmt: skip
@pytest.mark.test_all
def test_contradicting_places_are_one_line(places, wrong, said, started):
    with socket.create_server(("", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
    program = (
        "import sys\nfrom fedjax_ssl.run import hosts\ntry:\n    with hosts.joined(*sys.argv[1:]): pass\n"
        "except Exception as error: print(error, file=sys.stderr)"
    )
    pipes = {"stderr": subprocess.PIPE, "text": True, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    command = [sys.executable, "-c", program, address]
    started += [subprocess.Popen([*command, *place[::-1].split()], **pipes) for place in ("0 2", *places)]
    texts = [process.communicate(timeout=120)[1] for process in started]
    told = [said in text for text in texts]
    assert sum(told) == wrong and not any("Traceback" in text for text in texts), texts


def test_a_failed_start_leaves_no_timer_that_ends_the_caller(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("must be called before any JAX computations")

    before = set(threading.enumerate())
    monkeypatch.setattr(jax.distributed, "initialize", refuse)
    with pytest.raises(UserError, match="must be called before"):
        link.HostLink("localhost:1", 2, 0, None)
    for thread in set(threading.enumerate()) - before:
        if isinstance(thread, threading.Timer):
            thread.join(5)
            assert not thread.is_alive()


@pytest.mark.parametrize("words, said", [
    (["--process_id=0"], "coordinator_address should be defined"),
    (["--coordinator=a:1", "--num_processes=two", "--process_id=0"], "--num_processes is 'two'"),
    (["--coordinator=a:1", "--num_processes=2", "--process_id=2"], "process_id < num_processes"),
    (["--coordinator=a", "--num_processes=2", "--process_id=0"], "--coordinator is 'a'; it must be HOST:PORT"),
])  # fmt: skip
def test_a_place_that_makes_no_sense_is_one_line(words, said, capfd, tmp_path, monkeypatch):
    """Before JAX computes, so in a process that has computed this check of JAX is left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(link, "PORT_SECONDS", 0.0)
    monkeypatch.setattr(jax.distributed, "initialize", distributed.State().initialize)
    assert launch.main(words) == 2
    (line,) = [
        line for line in capfd.readouterr().err.splitlines() if "loading" not in line and "for the oth" not in line
    ]
    assert line.startswith("error: ") and said in line and list(tmp_path.iterdir()) == []


def test_a_port_in_use_is_one_line(monkeypatch):
    monkeypatch.setattr(link, "PORT_SECONDS", 0.0)
    monkeypatch.setattr(jax.distributed, "initialize", distributed.State().initialize)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"process 0 cannot listen at port {port}: "):
            link.HostLink(f"localhost:{port}", 2, 0, None)


def in_slurm(monkeypatch, **more):
    step = {
        "SLURM_JOB_ID": "4096",
        "SLURM_STEP_NODELIST": "node[07-09]",
        "SLURM_NTASKS": "6",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_NODES": "3",
        **more,
    }
    for name, value in step.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("more, gpus", [
    ({}, None),
    ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, [2, 3]),  # one host's devices, for its two tasks
    ({"CUDA_VISIBLE_DEVICES": "1"}, [0]),  # SLURM has divided them itself
    ({"CUDA_VISIBLE_DEVICES": "0,1,2", "SLURM_NTASKS": "3", "SLURM_LOCALID": "0"}, [0, 1, 2]),  # a host's only task
])  # fmt: skip
def test_slurm_gives_a_process_its_place(monkeypatch, more, gpus):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert link.find_cluster() is None and link.gpus_of_task() is None
    in_slurm(monkeypatch, **more)
    assert link.find_cluster() == "slurm" and link.gpus_of_task() == gpus
    monkeypatch.setattr(hosts, "HostLink", lambda *_: pytest.fail("it joins others"))
    with hosts.joined(num_processes="1"):
        pass
    in_slurm(monkeypatch, SLURM_NTASKS="1", SLURM_PROCID="0")
    assert link.find_cluster() is None
