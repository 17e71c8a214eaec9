"""SIGINT and SIGTERM: they end the process at once; during rounds the state is saved first, unless a second one comes.

The commands exit by `os._exit`: Python's own handlers wait for the compiler or a computation to return, and an
interpreter that exits while XLA compiles in a thread crashes. A caller of `train` keeps its own handlers until the
rounds begin.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from fedjax_ssl.base.files import discard_unfinished

ENDING = (signal.SIGINT, signal.SIGTERM)
_holding: list["Signals"] = []  # the one that receives the signals of a watching process
_watched = False


class Signals:
    """Delays a signal until the end of a dispatch; a second one acts at once. A context manager.

    Attributes:
        received: the signal that this process has received; None: no signal.
        agreed: the signal that ends the run, which all hosts know of, see `HearSignals`.
    """

    def __init__(self):
        self.received: int | None = None
        self.agreed: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        _holding.append(self)

        def remember(number, _):
            self.received = number
            signal.signal(number, self._before[number])

        with contextlib.suppress(ValueError):  # not in the main thread: the caller handles signals
            for number in () if _watched else ENDING:
                self._before[number] = signal.signal(number, remember)
        return self

    def __exit__(self, *_: Any) -> None:
        _holding.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def act(self) -> None:
        """Ends the run if there is a delayed signal."""
        if self.agreed == signal.SIGINT:
            raise KeyboardInterrupt
        if self.agreed is not None:
            raise SystemExit(128 + self.agreed)


def watch_signals(farewell: Callable[[], str]) -> None:
    """Ends this process soon after a signal, whatever it is doing, unless a `Signals` delays it.

    The exit status is 128 plus the signal's number. Call it in the main thread of a process of its own.
    `farewell` gives the end of the last line: what is left and how to resume.
    """
    global _watched
    _watched = True
    # The operating system's handler writes the number into a socket, even while Python waits for the compiler. A thread
    # reads it; it only needs Python's lock, which the compiler does not hold.
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    for number in ENDING:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)  # detached, it stays open
    threading.Thread(target=_watch, args=(reading, farewell), name="signals", daemon=True).start()


def _watch(reading: socket.socket, farewell: Callable[[], str]) -> None:
    while True:
        number = reading.recv(1)[0]
        name = "interrupted" if number == signal.SIGINT else signal.Signals(number).name
        if not _holding or _holding[-1].received is not None:
            leave(128 + number, f"{name}: {farewell()}")
        _say(f"{name}: the rounds in progress end and are saved; once more leaves at once")
        _holding[-1].received = number


def leave(status: int, text: str) -> NoReturn:
    """Ends the process without waiting, with a last line. Its locks are released; files are replaced as a whole."""
    _say(text)
    discard_unfinished()
    os._exit(status)


def _say(text: str) -> None:
    """Prints a line on stderr without Python's buffers and their locks, which the main thread may hold."""
    clear = "\r\x1b[K\x1b[?25h" if os.isatty(2) else ""  # shows the cursor again
    with contextlib.suppress(OSError):
        os.write(2, f"{clear}{text}\n".encode())
