"""SIGINT and SIGTERM while Python cannot run its handlers: a process ends at once or saves first."""

import os
import signal
import subprocess
import sys

import pytest

from fedjax_ssl.run.signals import Signals
from tests.helpers.runs import ROOT

pytestmark = pytest.mark.test_all

BOTH = [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "SIGTERM")]
# Minutes of C code without Python's lock, like compiling: Python's handlers cannot run.
BUSY = "import hashlib; print('busy', flush=True); hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"


@pytest.fixture
def start(started):
    def start(*words):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, *map(str, words)], env=environment, **pipes))
        return started[-1]

    return start


def wait_for_line(stream, part):
    for line in stream:
        if part in line:
            return
    raise AssertionError(f"no line with {part!r}")


@pytest.mark.parametrize("number, status, word", BOTH)
def test_a_process_goes_while_python_waits_for_native_code(start, tmp_path, number, status, word):
    """It removes the file that it was writing."""
    path = tmp_path / "half.json"
    process = start(
        "-c",
        "import pathlib\n"
        "from fedjax_ssl.base.files import replaced\n"
        "from fedjax_ssl.run.signals import watch_signals\n"
        "watch_signals(lambda: 'nothing is lost')\n"
        f"with replaced(pathlib.Path({str(path)!r})) as file:\n"
        "    file.write(b'half')\n"
        f"    {BUSY}\n",
    )
    wait_for_line(process.stdout, "busy")
    assert len(list(tmp_path.iterdir())) == 1
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (status, f"{word}: nothing is lost\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number, status, word", BOTH)
def test_rounds_hold_the_first_signal_back_and_not_the_second(start, number, status, word):
    process = start(
        "-c",
        "from fedjax_ssl.run.signals import Signals, watch_signals\n"
        "watch_signals(lambda: 'gone')\n"
        "with Signals() as signals:\n"
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
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    held, gone = errors.splitlines()
    assert held.startswith(f"{word}: the rounds in progress") and gone == f"{word}: gone"


def test_a_caller_of_the_library_keeps_its_handlers():
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    with Signals() as signals:
        signal.raise_signal(signal.SIGTERM)
        assert signals.received == signal.SIGTERM
        signals.agreed = signals.received  # as `HearSignals` does
        with pytest.raises(SystemExit, match="143"):
            signals.act()
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_command_goes_while_it_compiles_and_leaves_no_folder(start, tmp_path):
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
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert errors.splitlines()[-1] == "SIGTERM: nothing has been written or changed"
    assert [path.name for path in tmp_path.iterdir()] == ["slow.py"]


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
