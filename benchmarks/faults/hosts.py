"""Processes of one run with wrong addresses, numbers, counts or configurations.

'told': every process ended with status 2 and one line, without a stack trace, within the stated time, and nothing was
written. A process that comes after the run has begun must end in the same way while the run continues ('right'): the
run's records are those of a run with two devices. Here the processes wait 40 seconds for each other instead of 300, and
20 instead of 60 for a free port.
"""

import functools
import http.server
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

from fedjax_ssl.records.workdir import METRICS

from .common import FIELDS, ROOT, Row, Trial, launch, row_of, words

MINUTES, COUNT = 12, 9
MEETING, PORT, STARTING = 40.0, 20.0, 60.0  # seconds; the last: until JAX is imported on a busy machine
CODE = f"""
import sys
from fedjax_ssl.run.hosts import link
link.MEETING_SECONDS, link.PORT_SECONDS = {MEETING}, {PORT}
from fedjax_ssl.__main__ import enter
sys.exit(enter())
"""


def run(trial: Trial) -> Iterator[Row]:
    """Yields the part's rows."""
    for turn in range(trial.count):
        if not trial.goes_on():
            break
        name, make = list(CASES.items())[turn % len(CASES)]
        workdir = trial.folder / f"run_{turn}"
        if make is None:
            outcome, note = _late(workdir, trial)
        else:
            outcome, note = _ends(make, workdir)
        yield row_of(name, {outcome: 1}, note)


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def _start(workdir: pathlib.Path, address: str, count: int, index: int, **fields) -> subprocess.Popen:
    command = [
        sys.executable, "-c", CODE, f"--config={ROOT}/configs/quickstart.py:fedanchor",
        *words({**FIELDS, "checkpoint_every": 1, **fields}), f"--workdir={workdir}",
        f"--coordinator={address}", f"--num_processes={count}", f"--process_id={index}",
    ]  # fmt: skip
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)


def _ends(make: Callable[[Callable, int], list[subprocess.Popen]], workdir: pathlib.Path) -> tuple[str, str]:
    """A case in which all processes must end by themselves: the outcome, and its duration with the output."""
    began = time.monotonic()
    processes = make(functools.partial(_start, workdir), _free_port())
    said, limit = [], began + MEETING + PORT + STARTING
    for process in processes:
        try:
            said.append(process.communicate(timeout=max(0.1, limit - time.monotonic()))[1])
        except subprocess.TimeoutExpired:
            for each in processes:
                each.kill()
                each.communicate()
            return "lost", "a process hangs"
    seconds = time.monotonic() - began
    lines = [[line for line in text.splitlines() if line.startswith(("error: ", "host "))] for text in said]
    note = f"{seconds:.0f} s; " + "; ".join(sorted({line for each in lines for line in each}))
    statuses = [process.returncode for process in processes]
    if any("Traceback" in text or "*** " in text or "@ " in text for text in said) or set(statuses) != {2}:
        print(statuses, *said, sep="\n")
        return "tracebacks", note
    if any(len(each) != 1 for each in lines) or workdir.exists():
        return "silent", note
    return "told", note


def _late(workdir: pathlib.Path, trial: Trial) -> tuple[str, str]:
    """A second process with the same number comes during the rounds."""
    address, whole = f"localhost:{_free_port()}", trial.folder / "whole"
    fields = {"num_rounds": 150, "rounds_per_dispatch": 1, "checkpoint_every": 50}
    processes = [_start(workdir, address, 2, index, **fields) for index in range(2)]
    while processes[0].poll() is None and not (workdir / METRICS).exists():
        time.sleep(0.05)
    began = time.monotonic()
    late = _start(workdir, address, 2, 1, **fields)
    _, errors = late.communicate()
    seconds = time.monotonic() - began
    said = [process.communicate()[1] for process in processes]
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    note = f"{seconds:.0f} s; {'; '.join(lines)}"
    if late.returncode != 2 or len(lines) != 1 or any("Traceback" in text for text in (errors, *said)):
        print(late.returncode, errors, *said, sep="\n")
        return "tracebacks", note
    alone = launch(
        f"--config={ROOT}/configs/quickstart.py:fedanchor",
        *words({**FIELDS, **fields}),
        f"--workdir={whole}",
        env={"JAX_NUM_CPU_DEVICES": "2"},
    )
    alone.communicate()
    is_same = (workdir / METRICS).read_bytes() == (whole / METRICS).read_bytes()
    if any(process.returncode for process in processes) or not is_same:
        print(*said, sep="\n")
        return "lost", note
    return "right", note


def _other_server(start: Callable, port: int) -> list[subprocess.Popen]:
    """The second process's address is that of a web server."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    elsewhere = server.server_address[1]
    return [start(f"localhost:{port}", 2, 0), start(f"localhost:{elsewhere}", 2, 1)]


CASES: dict[str, Callable[[Callable, int], list[subprocess.Popen]] | None] = {
    # RFC 5737 reserves 192.0.2.0/24, and RFC 2606 the name .invalid.
    "a coordinator's address that is nobody's": lambda start, port: [start(f"192.0.2.7:{port}", 2, i) for i in (0, 1)],
    "a coordinator's name that is none, at one process": lambda start, port: [
        start(f"localhost:{port}", 2, 0), start(f"no-such-host.invalid:{port}", 2, 1)
    ],
    "another server at the address": _other_server,
    "numbers 0, 1, 1 of 3": lambda start, port: [start(f"localhost:{port}", 3, i) for i in (0, 1, 1)],
    "numbers 0, 0 of 2": lambda start, port: [start(f"localhost:{port}", 2, i) for i in (0, 0)],
    "one process fewer than named": lambda start, port: [start(f"localhost:{port}", 3, i) for i in (0, 1)],
    "one process more, which was told another count": lambda start, port: [
        start(f"localhost:{port}", n, i) for n, i in ((3, 0), (3, 1), (4, 3))
    ],
    "other configurations": lambda start, port: [
        start(f"localhost:{port}", 2, 0), start(f"localhost:{port}", 2, 1, **{"client.learning_rate": 0.5})
    ],
    "one process more, of a number that the run has": None,
}  # fmt: skip
