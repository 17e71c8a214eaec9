"""The bridge to Flower with Flower's own processes on this machine, as a user starts them."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import chex
import numpy as np
import pytest

from fedjax_ssl import train
from fedjax_ssl.flower.settings import run_config
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.run.experiment import build_experiment
from tests.helpers.flower_run import needs_flower, settings
from tests.helpers.runs import ROOT

SECONDS = 400  # for the whole run on a busy machine
FOUR = {
    "num_clients": 4, "clients_per_round": 4, "num_rounds": 2, "data.labels": "clients", "data.labelled_share": 1.0,
    "data.server_labels": 0, "data.examples_per_client": 300, "data.partition": "iid", "client.epochs": 5,
    "model.statistics": "cohort", "server.epochs": 1, "server.pretrain_epochs": 0,
}  # fmt: skip


class Processes:
    """Processes that are finally stopped with their children."""

    def __init__(self, folder, environment):
        self._folder, self._environment, self._started = folder, environment, []

    def start(self, name, *words):
        log = (self._folder / f"{name}.log").open("w")
        command = [shutil.which(words[0], path=self._environment["PATH"]), *map(str, words[1:])]
        process = subprocess.Popen(
            command, env=self._environment, cwd=self._folder, stdout=log, stderr=subprocess.STDOUT
        )
        self._started.append((process, log))
        return process

    def stop(self):
        import psutil

        everybody = []
        for process, _ in self._started:
            with contextlib.suppress(psutil.NoSuchProcess):
                everybody += [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for process, _ in reversed(self._started):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(everybody, timeout=10)
        for one in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        for process, log in self._started:
            process.wait(timeout=10)
            log.close()

    def logs(self):
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self._folder.glob("*.log")))


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def until(what, seconds, processes):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, processes.logs()
        time.sleep(0.2)


def answers(port):
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def processes(tmp_path):
    scripts = pathlib.Path(sys.executable).parent
    home = tmp_path / "home"
    home.mkdir()
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        # No traffic to the outside, no installations.
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "JAX_PLATFORMS": "cpu",
    }
    started = Processes(tmp_path, environment)
    yield started
    started.stop()


def federation(tmp_path, processes, project, run, nodes):
    """Starts Flower with a node for each node configuration, trains, and returns the run's folder."""
    port, *of_nodes = (free_port() for _ in range(1 + len(nodes)))
    (tmp_path / "home" / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    processes.start("superlink", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", port)
    until(lambda: answers(port), 60, processes)
    for client, (of_node, node) in enumerate(zip(of_nodes, nodes)):
        processes.start(
            f"node{client}", "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}", "--host",
            "127.0.0.1", "--port", of_node, "--node-config", node,
        )  # fmt: skip
    workdir = tmp_path / "run"
    told = {**run, "workdir": str(workdir)}
    (tmp_path / "run.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in told.items()))
    started = processes.start("run", "flwr", "run", project, "here", "--stream", "--run-config", tmp_path / "run.toml")
    until(lambda: started.poll() is not None or (workdir / "summary.json").exists(), SECONDS, processes)
    assert (workdir / "summary.json").exists(), processes.logs()
    return workdir


@pytest.mark.test_all
@needs_flower
def test_two_rounds_of_real_processes_equal_the_simulation(tmp_path, processes, monkeypatch):
    # The project as a user copies it, with its own config, which Flower sends to the nodes.
    project = tmp_path / "project"
    shutil.copytree(ROOT / "configs" / "flower", project)
    shutil.copy(ROOT / "configs" / "quickstart.py", project / "mine.py")
    monkeypatch.syspath_prepend(project)
    run = {**settings(**{"data.reveal_labels": True}), "config": "mine.py:supervised"}
    # One node has its images in a file: the partition's images, so that the simulation has the same data.
    built, file = build_experiment(run_config(run)), tmp_path / "mine.npz"
    rows = built.partition.client_rows[1]
    np.savez(file, images=built.dataset.x_train[rows], labels=built.dataset.y_train[rows])
    nodes = ["partition-id=0 num-partitions=2", f'partition-id=1 num-partitions=2 data="{file}"']
    workdir = federation(tmp_path, processes, project, run, nodes)

    config = run_config(run)
    simulated = train(config, tmp_path / "simulated")
    assert simulated.clients  # each client remembers its optimizer
    state = simulated._replace(clients={})
    found = Checkpoints(workdir / "checkpoints").restore(state).state
    chex.assert_trees_all_close(found, state, atol=1e-4)
    lines, wanted = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (workdir, tmp_path / "simulated")
    )
    assert len(lines) == len(wanted) == 2
    for line, simulated_line in zip(lines, wanted):
        for name in ("bytes_down", "bytes_up", "uploads", "local_steps"):
            assert line[name] == simulated_line[name] > 0, name
        for name in set(line) & set(simulated_line):
            assert line[name] == pytest.approx(simulated_line[name], rel=1e-3, abs=1e-4), name


LIAR = """
from fedjax_ssl.flower import client
from fedjax_ssl.server.statistics import Sums

app = client.app
open_node, to_record = client.open_node, client.to_record


def opened(context):
    node = open_node(context)
    client.to_record = lie if node.clients == (3,) else to_record
    return node


def lie(tree):
    if isinstance(tree, Sums):
        tree = tree._replace(total=far(tree.total, tree.count))
    return to_record(tree)


def far(part, count):
    if "var" not in part:
        return {name: far(one, count) for name, one in part.items()}
    return {"mean": 0 * part["mean"] + 100 * count, "var": 0 * part["var"] + 1e4 * count}


client.open_node = opened
"""


@pytest.mark.test_all
@needs_flower
def test_one_lying_node_of_four(tmp_path, processes):
    """Its parameters are honest; its layers' means are 100 and their variances 10,000."""
    project = tmp_path / "project"
    shutil.copytree(ROOT / "configs" / "flower", project)
    (project / "liar.py").write_text(LIAR)
    settled = (project / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(settled.replace("fedjax_ssl.flower.client:app", "liar:app"))
    run = settings("supervised", **FOUR, **{"aggregation.mean": "median"})
    workdir = federation(tmp_path, processes, project, run, [f"partition-id={client}" for client in range(4)])
    train(run_config(run), tmp_path / "simulated")
    found, honest = (
        json.loads((folder / "summary.json").read_text())["test_accuracy"]
        for folder in (workdir, tmp_path / "simulated")
    )
    assert honest > 0.8 and found > honest - 0.02, (found, honest)
