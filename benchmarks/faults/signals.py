"""SIGINT, SIGTERM and SIGHUP while a run compiles, trains or draws its report, and while `report` draws.

'right': the process ended within ten seconds, with its status and only the lines that it should print. It left no
half-written file. The command in its last line, or the same command if it says that nothing was written, ends the run
with the bytes of an undisturbed run and with its report. The note has the longest time that a process took to end. The
last row closes the terminal in which a run trains.
"""

import collections
import os
import pathlib
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from fedjax_ssl.records.workdir import METRICS, REPORT

from .common import FIELDS, ROOT, Row, Trial, launch, row_of, words

MINUTES, COUNT = 12, 15
SECONDS = 10.0
NAMES = {signal.SIGINT: "interrupted", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
# Stage -> the text on stderr, or the file in the run's folder, that marks its beginning.
STAGES = {
    "a signal while compiling": "compiling the",
    "a signal in the rounds": METRICS,
    "a signal while the run's report is drawn": "drawing the report",
    "a signal while `report` draws": "drawing the report",
}
IN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
COMPILING, ROUNDS, _, REPORTING = STAGES
TERMINAL = "a closed terminal, in the rounds"


def run(trial: Trial) -> Iterator[Row]:
    """Yields the part's rows."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under `nohup`, child processes would ignore it, too
    tries = [(stage, number) for stage in STAGES for number in NAMES] + 3 * [(TERMINAL, signal.SIGHUP)]
    reference = trial.folder / "reference"
    process = launch(*_words(reference))
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    outcomes, longest = collections.defaultdict(collections.Counter), collections.Counter()
    for turn in range(trial.count):
        if not trial.goes_on():
            break
        stage, number = tries[turn % len(tries)]
        workdir = trial.folder / f"try_{turn}"
        if stage == TERMINAL:
            what, seconds = _close_terminal(workdir)
        else:
            what, seconds = _send(stage, number, workdir, reference, trial)
        if what == "right" and (workdir / METRICS).read_bytes() != (reference / METRICS).read_bytes():
            what = "lost"
        shutil.rmtree(workdir, ignore_errors=True)
        if what == "over":  # it ended before the signal, so this is no try
            continue
        outcomes[stage][what] += 1
        longest[stage] = max(longest[stage], seconds)
    for stage, counts in outcomes.items():
        yield row_of(stage, counts, f"at most {longest[stage]:.1f} s")


def _words(workdir: pathlib.Path, rounds: int = 6) -> list[str]:
    fields = {**FIELDS, "num_rounds": rounds, "checkpoint_every": 1, "log.report": True, "rounds_per_dispatch": 1}
    return [f"--config={ROOT}/configs/quickstart.py:fedanchor", *words(fields), f"--workdir={workdir}"]


def _send(stage: str, number: int, workdir: pathlib.Path, reference: pathlib.Path, trial: Trial) -> tuple[str, float]:
    """A try: the outcome, and the time until the process ended."""
    arguments, environment = _words(workdir), {"PYTHONUNBUFFERED": "1"}
    if stage == COMPILING:
        environment["XDG_CACHE_HOME"] = str(trial.folder / "cold")  # so that nothing comes from earlier starts
        shutil.rmtree(trial.folder / "cold", ignore_errors=True)
    if stage == REPORTING:
        shutil.copytree(reference, workdir)
        arguments = ["report", str(workdir)]
    process, said = launch(*arguments, env=environment), []
    if stage == ROUNDS:
        while process.poll() is None and not _has_a_line(workdir / METRICS):
            time.sleep(0.002)
    else:
        for line in process.stderr:
            said.append(line)
            if STAGES[stage] in line:
                break
        time.sleep(trial.rng.uniform(0, 1))
    sent = time.monotonic()
    process.send_signal(number)
    try:
        _, rest = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return "lost", SECONDS
    seconds = time.monotonic() - sent
    if process.returncode == 0:
        return "over", seconds
    lines = [line for line in rest.splitlines() if line and not re.search(r"  \d:\d\d:\d\d$", line)]
    if "Traceback" in rest or process.returncode != 128 + number:
        print(rest, file=sys.stderr)
        return "tracebacks", seconds
    own = [line for line in lines if line.startswith((NAMES[number], "stopped;"))]
    if len(own) != (2 if stage == ROUNDS else 1) or _unfinished(workdir):
        print(rest, _unfinished(workdir), file=sys.stderr)
        return "silent", seconds
    return ("right" if _is_resumed(own[-1], stage, arguments, workdir) else "lost"), seconds


def _has_a_line(path: pathlib.Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _unfinished(workdir: pathlib.Path) -> list[pathlib.Path]:
    return list(workdir.rglob("*.tmp"))


def _is_resumed(line: str, stage: str, arguments: list[str], workdir: pathlib.Path) -> bool:
    """Does what the last line says; returns whether the run is then complete."""
    named = re.search(r"python launch\.py (.*) resumes the run$", line)
    if named:
        arguments = shlex.split(named[1])
    elif stage == REPORTING:
        if not line.endswith("the same command draws the report anew"):
            return False
    elif not line.endswith("nothing has been written or changed") or workdir.exists():
        return False
    process = launch(*arguments)
    _, errors = process.communicate()
    complete = process.returncode == 0 and (workdir / REPORT).exists() and "Traceback" not in errors
    if not complete:
        print(line, errors, sep="\n", file=sys.stderr)
    return complete


def _close_terminal(workdir: pathlib.Path) -> tuple[str, float]:
    """Trains in a new terminal that is closed during training."""
    master, slave = pty.openpty()
    command = [sys.executable, "-c", IN_TERMINAL, sys.executable, str(ROOT / "launch.py"), *_words(workdir)]
    ends = {"stdin": slave, "stdout": slave, "stderr": slave}
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **ends)
    os.close(slave)
    os.set_blocking(master, False)
    while process.poll() is None and not _has_a_line(workdir / METRICS):
        try:
            os.read(master, 65536)
        except (BlockingIOError, OSError):
            time.sleep(0.01)
    closed = time.monotonic()
    os.close(master)
    try:
        status = process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "lost", SECONDS
    seconds = time.monotonic() - closed
    if status != 129:
        return "over" if status == 0 else "tracebacks", seconds
    resumed = launch(f"--workdir={workdir}")
    resumed.communicate()
    return "right" if resumed.returncode == 0 else "lost", seconds
