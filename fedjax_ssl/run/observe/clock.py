"""What is being done, with a clock, while nothing else moves on the screen."""

import contextlib
import datetime
import sys
import threading
import time
from collections.abc import Iterator

from fedjax_ssl.run.observe.log import NORMAL, shows

REFRESH_SECONDS = 1.0  # of the line in a terminal
FIRST_LINE_SECONDS = 2.0  # without a terminal; each later line comes when the time has doubled


class Doing:
    """One thing that takes its time.

    Attributes:
        text: what it is, may be changed.
        since: when it began.
        next_line: after how many seconds the next line is due where there is no terminal.
    """

    def __init__(self, text: str):
        self.text, self.since, self.next_line = text, time.monotonic(), FIRST_LINE_SECONDS

    def line(self) -> str:
        """The text with the time so far."""
        return f"{self.text}  {datetime.timedelta(seconds=int(time.monotonic() - self.since))}"


_doing: list[Doing] = []  # the innermost is shown
_lock = threading.Lock()
_awake = threading.Condition(_lock)
_thread: threading.Thread | None = None
_silent = False


def be_silent() -> None:
    """From now on nothing is shown, as in a process that another one speaks for."""
    global _silent
    _silent = True


@contextlib.contextmanager
def doing(text: str) -> Iterator[Doing]:
    """Shows what is done inside: in a terminal a line with a clock that goes away, elsewhere lines if it takes long."""
    global _thread
    task = Doing(text)
    with _awake:
        _doing.append(task)
        if _thread is None or not _thread.is_alive():  # it does not live on in a forked process
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
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none: nothing to show
        sys.stderr.write(text)
        sys.stderr.flush()
