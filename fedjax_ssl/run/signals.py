"""Handles SIGINT, SIGTERM and SIGHUP: they end the process at once; during rounds the state is saved first.

The commands exit by `os._exit`: Python's own handlers wait for the compiler or a computation to return, and an
interpreter that exits while XLA compiles in a thread crashes. A caller of `train` keeps its own handlers until the
rounds begin.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from fedjax_ssl.files import discard_unfinished

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_holding: list["Signals"] = []  # the last one receives the signals of a watching process
_watched = False


class Signals:
    """Delays signals until the end of a dispatch; a second signal acts at once. A context manager.

    Attributes:
        received: the signal that this process has received; None: no signal.
        agreed: the signal that all hosts know of, if there are several, see `HearSignals`.
    """

    def __init__(self, several_hosts: bool = False):
        """Delays nothing until it is entered.

        Args:
            several_hosts: whether a signal ends the run only once all hosts know of it; otherwise the others would wait
                for a host that has left.
        """
        self.received: int | None = None
        self.agreed: int | None = None
        self._several_hosts = several_hosts
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        _holding.append(self)
        if _watched:
            return self

        def remember(number, _):
            self.received = number
            signal.signal(number, self._before[number])

        with contextlib.suppress(ValueError):  # not in the main thread: the caller handles signals
            for number in _heard():
                self._before[number] = signal.signal(number, remember)
        return self

    def __exit__(self, *_: Any) -> None:
        _holding.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def waiting(self) -> int | None:
        """The signal that ends the run; None: no signal."""
        return self.agreed if self._several_hosts else self.received

    def act(self) -> None:
        """Ends the run if there is a delayed signal.

        Raises:
            KeyboardInterrupt, SystemExit: after SIGINT, and after SIGTERM or SIGHUP.
        """
        if self.waiting == signal.SIGINT:
            raise KeyboardInterrupt
        if self.waiting is not None:
            raise SystemExit(128 + self.waiting)


@contextlib.contextmanager
def watch_signals(farewell: Callable[[], str]) -> Iterator[None]:
    """Ends this process soon after a signal, whatever it is doing, unless a `Signals` delays it.

    The exit status is 128 plus the signal's number. Use it in the main thread of a process of its own.

    Args:
        farewell: gives the end of the last line: what is left and how to resume.
    """
    global _watched
    # The operating system's handler writes the number into a socket, even while Python waits for the compiler. A thread
    # reads it; it only needs Python's lock, which the compiler does not hold.
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def hear(number, _):
        if _hangs_up(number):  # between two of Python's instructions: before the next print
            _show_nothing_more(terminals)

    handlers = {number: signal.signal(number, hear) for number in _heard()}
    before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(reading, farewell, terminals), name="signals", daemon=True)
    _watched = True
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _watched = False
        writing.close()
        thread.join()
        reading.close()


def _watch(reading: socket.socket, farewell: Callable[[], str], terminals: Sequence[int]) -> None:
    while number := reading.recv(1):
        if number[0] not in ENDING:
            continue
        holder = _holding[-1] if _holding else None
        if _hangs_up(number[0]):
            _show_nothing_more(terminals)
        if _hangs_up(number[0]) and holder is not None and holder.received is not None:
            continue  # closing a terminal may send two: to the session's leader, and to its foreground group
        if holder is None or holder.received is not None:
            leave(128 + number[0], f"{_name(number[0])}: {farewell()}")
        _say(f"{_name(number[0])}: the rounds in progress end and are saved; once more leaves at once")
        holder.received = number[0]


def leave(status: int, text: str) -> NoReturn:
    """Ends the process without waiting. Its locks are released, and files are only ever replaced as a whole.

    Args:
        status: the exit status.
        text: a last line.
    """
    _say(text)
    discard_unfinished()
    os._exit(status)


def _say(text: str) -> None:
    """Prints a line on stderr without Python's buffers and their locks, which the main thread may hold."""
    clear = "\r\x1b[K\x1b[?25h" if sys.stderr is not None and sys.stderr.isatty() else ""  # shows the cursor again
    with contextlib.suppress(OSError):
        os.write(2, f"{clear}{text}\n".encode())


def _show_nothing_more(terminals: Sequence[int]) -> None:
    """Discards what is printed: a closed terminal refuses it, and the state must still be saved.

    The terminal may refuse it only some time after SIGHUP, so nothing is tried first.
    """
    for number in terminals:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


def _hangs_up(number: int) -> bool:
    return number == getattr(signal, "SIGHUP", None)


def _heard() -> list[int]:
    """The signals that end this process; `nohup` removes SIGHUP."""
    return [number for number in ENDING if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN]


def _name(number: int) -> str:
    return "interrupted" if number == signal.SIGINT else signal.Signals(number).name
