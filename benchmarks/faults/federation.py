"""Four real nodes of Flower: one is hostile, one is killed in the middle, and a fifth claims another node's client.

The hostile node sends what its client trained in round 1, arrays of wrong shapes in round 2, NaN in round 3, and its
answer of round 1 again in round 4. Another node gets SIGKILL once round 3 is recorded. The fifth node would send NaN if
asked. None of this may reach the model: a second federation has the same nodes except the fifth, and its nodes fail in
those rounds instead of sending anything. 'right': both end with the same model figures in metrics.jsonl and the same
numbers in the last checkpoint, to the bit, and a line or a count of dropped uploads says what was not used. A try is a
bad answer, a killed node, or the fifth node. Without Flower there are no tries.
"""

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
from collections.abc import Callable, Iterator

from fedjax_ssl.config import parse_config
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.workdir import CHECKPOINTS, METRICS, SUMMARY
from fedjax_ssl.run.experiment import build_experiment

from .common import FIELDS, ROOT, Row, Trial, same, words

MINUTES, COUNT = 30, 5
METHOD, ROUNDS, KILLED_AFTER = "supervised", 4, 3
UPLOADS = [4, 3, 3, 2]  # usable uploads in each round
OF_THE_MODEL = ("round", "test_accuracy", "test_loss", "update_norm")
NODES = {0: "", 1: "", 2: "", 3: "hostile"}  # client -> behaviour of its node
CALM = {0: "", 1: "", 2: "fails", 3: "fails"}  # in the rounds in which it is killed or hostile
# All nodes' ClientApp: the library's, unless the node's environment changes it.
APP = f"""
import os

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp

from fedjax_ssl.flower import client

DOES, CLIENT = os.environ.get("FAULT", ""), os.environ.get("CLIENT", "")
app = ClientApp() if DOES else client.app


def altered(record, change):
    return ArrayRecord({{name: Array(change(array.numpy())) for name, array in record.items()}})


if DOES:
    app.query("hello")(client.hello)
    app.query("statistics")(client.statistics)

    @app.train()
    def train(message, context):
        number = int(message.metadata.group_id)
        if DOES == "fails" and (number in (2, 3, 4) if CLIENT == "3" else number > {KILLED_AFTER}):
            raise RuntimeError("it takes no part")
        reply = client.train(message, context)
        if DOES == "fails":
            return reply
        content = reply.content
        if number == 1:
            for name, record in content.items():
                context.state[f"kept-{{name}}"] = record
        elif number == 2:
            content["upload-0"] = altered(content["upload-0"], lambda array: np.stack([array, array]))
        elif number == 3 or DOES == "impostor":
            content["upload-0"] = altered(content["upload-0"], lambda array: np.full_like(array, np.nan))
        elif number == 4:
            for name in list(content):
                content[name] = context.state[f"kept-{{name}}"]
        return reply
"""


def run(trial: Trial) -> Iterator[Row]:
    """Yields the part's rows."""
    try:
        import flwr  # noqa: F401
    except ImportError:
        print("Flower is not installed: pip install '.[flower]'")
        return
    began = time.monotonic()
    bad, said = _federation(trial.folder / "hostile", NODES, trial, disturbed=True)
    seconds = time.monotonic() - began
    calm, _ = _federation(trial.folder / "calm", CALM, trial, disturbed=False)
    config = parse_config(f"{ROOT}/configs/quickstart.py:{METHOD}", words(_fields()))
    lines, calm_lines = (
        [json.loads(line) for line in (workdir / METRICS).read_text().splitlines()] for workdir in (bad, calm)
    )
    for some in (lines, calm_lines):
        assert [line["uploads"] - line["dropped_uploads"] for line in some] == UPLOADS, some
    is_same = (
        (bad / SUMMARY).exists()
        and [[line[name] for name in OF_THE_MODEL] for line in lines]
        == [[line[name] for name in OF_THE_MODEL] for line in calm_lines]
        and same(_state(bad, config), _state(calm, config))
    )
    parts = {
        "arrays of wrong shapes": "has an array of shape",
        "numbers that are none": None,  # counted in dropped_uploads, without a line
        "an answer of an earlier round": "it is of turn 1 of the run, not of turn 4",
        "SIGKILL of a node": f"gave no answer in round {KILLED_AFTER + 1}",
        "a fifth node for another's client": "which is connected",
    }
    for fault, part in parts.items():
        told = lines[2]["dropped_uploads"] == 1 if part is None else part in said
        if not (is_same and told):
            print(fault, lines, calm_lines, said, sep="\n")
        outcome = "tracebacks" if "Traceback" in said else "right" if is_same and told else "silent"
        yield Row(fault, **{outcome: 1}, note=f"{ROUNDS} rounds in {seconds:.0f} s")


def _fields() -> dict:
    return {
        **FIELDS, "num_rounds": ROUNDS, "num_clients": 4, "checkpoint_every": 1, "client.persistent": True,
        "data.labels": "clients", "data.labelled_share": 0.5, "data.server_labels": 0, "model.normalisation": "running",
    }  # fmt: skip


def _state(workdir: pathlib.Path, config):
    shape = build_experiment(config).state_shape
    return Checkpoints(workdir / CHECKPOINTS).restore(shape._replace(clients={})).state


def _federation(folder: pathlib.Path, does: dict[int, str], trial: Trial, disturbed: bool) -> tuple[pathlib.Path, str]:
    """A run by Flower's processes: its workdir, and the server's output."""
    project, workdir = folder / "project", folder / "run"
    shutil.copytree(ROOT / "configs" / "flower", project)
    text = (project / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(text.replace("fedjax_ssl.flower.client:app", "behaviour:app"))
    (project / "behaviour.py").write_text(APP)
    (folder / "home").mkdir()
    port = _free_port()
    (folder / "home" / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    given = {
        "config": f"{ROOT}/configs/quickstart.py:{METHOD}",
        "overrides": " ".join(words(_fields())),
        "workdir": str(workdir),
        "wait": 600,
        "timeout": 900,  # enough for a busy machine: Flower notices a killed node earlier
    }
    (folder / "run.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items()))
    processes = _Processes(folder)
    try:
        processes.start("superlink", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", port)
        _until(lambda: _answers(port), trial)
        nodes = {client: processes.node(client, port, what) for client, what in does.items()}
        started = processes.start(
            "run", "flwr", "run", project, "here", "--stream", "--run-config", folder / "run.toml"
        )

        def said() -> str:
            return "".join((folder / f"{name}.log").read_text() for name in ("superlink", "run"))

        def recorded(rounds: int) -> bool:
            metrics = workdir / METRICS
            if started.poll() is not None and not (workdir / SUMMARY).exists():
                raise RuntimeError(f"the federation ended before its last round:\n{said()[-3000:]}")
            return metrics.exists() and metrics.read_bytes().count(b"\n") >= rounds

        if disturbed:
            _until(lambda: recorded(1), trial)
            processes.node(0, port, "impostor")
            _until(lambda: recorded(KILLED_AFTER), trial)
            _kill(nodes[2])
        _until(lambda: recorded(ROUNDS) and (workdir / SUMMARY).exists(), trial)
        _until(lambda: f"round {ROUNDS}/{ROUNDS}: " in said(), trial)  # Flower forwards lines a little later
        return workdir, said()
    finally:
        processes.stop()


class _Processes:
    """Flower's processes, which are ended with all their children."""

    def __init__(self, folder: pathlib.Path):
        self._folder, self._started = folder, []
        scripts = pathlib.Path(sys.executable).parent
        self._environment = {
            **os.environ,
            "FLWR_HOME": str(folder / "home"),
            # No traffic to the outside, no installations.
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "JAX_PLATFORMS": "cpu",
        }

    def start(self, name: str, command: str, *arguments, **environment) -> subprocess.Popen:
        log = (self._folder / f"{name}.log").open("w")
        environment = {**self._environment, **environment}
        words = [shutil.which(command, path=environment["PATH"]), *map(str, arguments)]
        process = subprocess.Popen(words, env=environment, cwd=self._folder, stdout=log, stderr=subprocess.STDOUT)
        self._started.append(process)
        return process

    def node(self, client: int, port: int, does: str) -> subprocess.Popen:
        return self.start(
            f"node{client}{does}", "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}",
            "--host", "127.0.0.1", "--port", _free_port(), "--node-config", f"partition-id={client}",
            FAULT=does, CLIENT=str(client),
        )  # fmt: skip

    def stop(self) -> None:
        import psutil

        everybody = []
        for process in self._started:
            with contextlib.suppress(psutil.NoSuchProcess):
                everybody += [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for process in reversed(self._started):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for one in psutil.wait_procs(everybody, timeout=10)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        for process in self._started:
            process.wait()


def _kill(node: subprocess.Popen) -> None:
    """Sends SIGKILL to a node and its children."""
    import psutil

    for process in (*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    node.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _answers(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def _until(what: Callable[[], bool], trial: Trial) -> None:
    while not what():
        if not trial.goes_on():
            raise TimeoutError("the federation takes too long")
        time.sleep(0.2)
