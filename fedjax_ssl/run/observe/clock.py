"""Shows the current task and its duration."""

import contextlib
import datetime
import sys
import threading
import time
from collections.abc import Iterator

from fedjax_ssl.run.observe.log import NORMAL, shows

REFRESH_SECONDS = 1.0  # between updates of the line in a terminal
FIRST_LINE_SECONDS = 2.0  # before the first line without a terminal; each later line comes when the time has doubled


class Doing:
    """A task that takes time.

    Attributes:
        text: what the task is; may be changed.
        since: when it began.
        next_line: seconds after which the next line is printed if there is no terminal.
    """

    def __init__(self, text: str):
        self.text, self.since, self.next_line = text, time.monotonic(), FIRST_LINE_SECONDS

    def line(self) -> str:
        """The text with the time since the beginning."""
        return f"{self.text}  {datetime.timedelta(seconds=int(time.monotonic() - self.since))}"


_doing: list[Doing] = []  # the innermost is shown
_lock = threading.Lock()
_awake = threading.Condition(_lock)
_thread: threading.Thread | None = None
_silent = False


def be_silent() -> None:
    """Shows nothing from now on, for a process whose progress another process prints."""
    global _silent
    _silent = True


@contextlib.contextmanager
def doing(text: str) -> Iterator[Doing]:
    """Shows a task while it runs: in a terminal a line with a clock, elsewhere lines if it takes long."""
    global _thread
    task = Doing(text)
    with _awake:
        _doing.append(task)
        if _thread is None or not _thread.is_alive():  # a thread does not survive a fork
            _thread = threading.Thread(target=_show, name="clock", daemon=True)
            _thread.start()
        _awake.notify()
    try:
        yield task
    finally:
        with _lock:
            _doing.remove(task)
            if _is_terminal():
                _write("\r\x1b[K")


def _show() -> None:
    with _awake:
        while True:
            if not _doing:
                _awake.wait()
                continue
            task = _doing[-1]
            if _is_terminal():
                _write(f"\r{task.line()}\x1b[K")
            elif time.monotonic() - task.since >= task.next_line:
                task.next_line *= 2
                _write(f"{task.line()}\n")
            _awake.wait(REFRESH_SECONDS)


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _write(text: str) -> None:
    if _silent or not shows(NORMAL):
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the stream is closed, or there is none
        sys.stderr.write(text)
        sys.stderr.flush()
