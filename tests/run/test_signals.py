"""SIGINT, SIGTERM and SIGHUP while Python cannot run its handlers: a process ends at once or saves first."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios

import pytest

from fedjax_ssl.cli import commands
from fedjax_ssl.run.signals import Signals
from tests.helpers.runs import ROOT

ALL = [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "SIGTERM"), (signal.SIGHUP, 129, "SIGHUP")]
# Minutes of C code without Python's lock, like compiling: Python's handlers cannot run.
BUSY = "import hashlib; print('busy', flush=True); hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"


def hear_hangups():
    """Restores SIGHUP in a new process: nohup or a test run without a terminal may ignore it."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def start():
    started = []

    def start(*words, **more):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, *map(str, words)]
        started.append(subprocess.Popen(command, env=environment, preexec_fn=hear_hangups, **pipes, **more))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for_line(stream, part):
    for line in stream:
        if part in line:
            return
    raise AssertionError(f"no line with {part!r}")


@pytest.mark.parametrize("number, status, word", ALL)
@pytest.mark.processes
def test_a_process_goes_while_python_waits_for_native_code(start, tmp_path, number, status, word):
    """It removes the file that it was writing."""
    path = tmp_path / "half.json"
    process = start(
        "-c",
        "import pathlib\n"
        "from fedjax_ssl.files import replaced\n"
        "from fedjax_ssl.run.signals import watch_signals\n"
        f"with watch_signals(lambda: 'nothing is lost'), replaced(pathlib.Path({str(path)!r})) as file:\n"
        "    file.write(b'half')\n"
        f"    {BUSY}\n",
    )
    wait_for_line(process.stdout, "busy")
    assert len(list(tmp_path.iterdir())) == 1
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (status, f"{word}: nothing is lost\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number, status, word", ALL)
@pytest.mark.processes
def test_rounds_hold_the_first_signal_back_and_not_the_second(start, number, status, word):
    """A closed terminal may send SIGHUP twice; then only another signal ends the process."""
    process = start(
        "-c",
        "from fedjax_ssl.run.signals import Signals, watch_signals\n"
        "with watch_signals(lambda: 'gone'), Signals() as signals:\n"
        "    print('rounds', flush=True)\n"
        "    while signals.received is None: pass\n"
        "    print('saved', signals.received, flush=True)\n"
        f"    {BUSY}\n",
    )
    wait_for_line(process.stdout, "rounds")
    process.send_signal(number)
    wait_for_line(process.stdout, f"saved {int(number)}")
    wait_for_line(process.stdout, "busy")
    process.send_signal(number)
    second = word
    if number == signal.SIGHUP:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGTERM)
        status, second = 143, "SIGTERM"
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    held, gone = errors.splitlines()
    assert held.startswith(f"{word}: the rounds in progress") and gone == f"{second}: gone"


@pytest.mark.processes
def test_nohup_keeps_a_closed_terminal_away(start):
    process = start(
        "-c",
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"  # as nohup does before it starts a command
        "from fedjax_ssl.run.signals import watch_signals\n"
        "with watch_signals(lambda: 'gone'):\n"
        "    signal.raise_signal(signal.SIGHUP)\n"
        f"    {BUSY}\n",
    )
    wait_for_line(process.stdout, "busy")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[1] == "SIGTERM: gone\n"


@pytest.mark.processes
def test_rounds_are_saved_when_their_terminal_is_closed(tmp_path):
    """Output to the closed terminal is lost without an error."""
    saved, (master, slave) = tmp_path / "saved", pty.openpty()
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\n"
            "from fedjax_ssl.run.signals import Signals, watch_signals\n"
            "with watch_signals(lambda: 'gone'), Signals() as signals:\n"
            "    print('rounds', flush=True)\n"
            "    while signals.received is None: pass\n"
            "    print('round 2', flush=True); print('round 2', file=sys.stderr)\n"
            f"    open({str(saved)!r}, 'w').write('saved')\n"
            "    signals.act()\n",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: (hear_hangups(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),
    )
    os.close(slave)
    try:
        assert b"rounds" in os.read(master, 100)
        os.close(master)
        assert process.wait(60) == 129
    finally:
        process.kill()
        process.wait()
    assert saved.read_text() == "saved"


@pytest.mark.parametrize(
    "argv, said",
    [
        (["sweep", "x.py"], "the same command resumes the sweep"),
        (["report", "runs/a"], "the same command draws the report anew"),  # some of its pictures may be new
        (["predict", "--workdir=runs/a"], "nothing has been written or changed"),
        ([], "nothing has been written or changed"),
    ],
)
def test_the_last_line_says_what_is_left(argv, said):
    assert commands.farewell(argv) == said


def test_a_caller_of_the_library_keeps_its_handlers():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with Signals() as signals:
        signal.raise_signal(signal.SIGTERM)
        assert signals.received == signal.SIGTERM
        with pytest.raises(SystemExit, match="143"):
            signals.act()
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize("number, status, word", ALL)
@pytest.mark.processes
def test_a_command_goes_while_it_compiles_and_leaves_no_folder(start, tmp_path, number, status, word):
    """The compiler is replaced by minutes of native code that cannot be interrupted."""
    config = tmp_path / "slow.py"
    config.write_text(
        "import hashlib, jax\n"
        "from tests.helpers.runs import make_tiny_config\n"
        "def compile(lowered, *_):\n"
        f"    {BUSY}\n"
        "def get_config():\n"
        "    jax.stages.Lowered.compile = compile\n"
        "    return make_tiny_config()\n"
    )
    process = start(ROOT / "launch.py", f"--config={config}", f"--workdir={tmp_path / 'run'}")
    wait_for_line(process.stdout, "busy")
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert errors.splitlines()[-1] == f"{word}: nothing has been written or changed"
    assert [path.name for path in tmp_path.iterdir()] == ["slow.py"]


@pytest.mark.processes
def test_a_command_that_is_imported_goes_with_a_line(start):
    """The program watches signals before any slow import."""
    process = start(
        "-c",
        "import sys, builtins\n"
        "real = builtins.__import__\n"
        "def slow(name, *rest):\n"
        "    if name == 'fedjax_ssl.cli.commands':\n"
        f"        {BUSY}\n"
        "    return real(name, *rest)\n"
        "import fedjax_ssl.__main__ as program\n"
        "assert 'jax' not in sys.modules and 'numpy' not in sys.modules\n"
        "builtins.__import__ = slow\n"
        "program.enter()\n",
    )
    wait_for_line(process.stdout, "busy")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "interrupted: nothing has been written or changed\n")
