"""SIGINT, SIGTERM and SIGHUP. They end the process at once; during rounds the state is saved first.

The commands leave by `os._exit`: Python's handlers wait until the compiler or a computation returns, and an interpreter
that ends while XLA compiles in a thread crashes. A caller of `train` keeps its own handlers until the rounds begin.
"""

import contextlib
import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from fedjax_ssl.files import discard_unfinished

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_holding: list["Signals"] = []  # the last one gets the signals that a watching process receives
_watched = False


class Signals:
    """What ends a process waits for the end of a dispatch; a second one acts at once. A context manager.

    Attributes:
        received: the signal that this process has received; None without one.
        agreed: the one that all hosts know of, if there are several, see `HearSignals`.
    """

    def __init__(self, several_hosts: bool = False):
        """Holds nothing back yet.

        Args:
            several_hosts: a signal ends the run only when all of them know of it, or the others would wait for one
                that has left.
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

        with contextlib.suppress(ValueError):  # not in the main thread: signals are left to the caller
            for number in _heard():
                self._before[number] = signal.signal(number, remember)
        return self

    def __exit__(self, *_: Any) -> None:
        _holding.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def waiting(self) -> int | None:
        """The signal that ends the run; None without one."""
        return self.agreed if self._several_hosts else self.received

    def act(self) -> None:
        """Ends the run if a signal waits.

        Raises:
            KeyboardInterrupt, SystemExit: after SIGINT; after SIGTERM or SIGHUP.
        """
        if self.waiting == signal.SIGINT:
            raise KeyboardInterrupt
        if self.waiting is not None:
            raise SystemExit(128 + self.waiting)


@contextlib.contextmanager
def watch_signals(farewell: Callable[[], str]) -> Iterator[None]:
    """Ends this process within a moment of such a signal, whatever it is doing, unless a `Signals` holds it back.

    The exit status is 128 plus the signal's number. For a process of its own, in its
    main thread.

    Args:
        farewell: the line's end that says what is left behind and how to resume.
    """
    global _watched
    # The operating system's handler writes the number into a socket, also while Python waits for the compiler. A
    # thread reads it, which needs no more than Python's lock, and that the compiler does not hold.
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in _heard()}
    before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(reading, farewell), name="signals", daemon=True)
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


def _watch(reading: socket.socket, farewell: Callable[[], str]) -> None:
    while number := reading.recv(1):
        if number[0] not in ENDING:
            continue
        holder = _holding[-1] if _holding else None
        if number[0] == signal.SIGHUP and holder is not None and holder.received is not None:
            continue  # one closed terminal may send two: to the session's leader, and to its foreground group
        if holder is None or holder.received is not None:
            leave(128 + number[0], f"{_name(number[0])}: {farewell()}")
        _say(f"{_name(number[0])}: the rounds in progress end and are saved; once more leaves at once")
        holder.received = number[0]


def leave(status: int, text: str) -> NoReturn:
    """Ends the process without waiting. Locks are released with it, and files are only ever replaced whole.

    Args:
        status: its exit status.
        text: a last line.
    """
    _say(text)
    discard_unfinished()
    os._exit(status)


def _say(text: str) -> None:
    """A line on stderr, past Python's buffers and their locks, which the main thread may hold."""
    clear = "\r\x1b[K\x1b[?25h" if sys.stderr is not None and sys.stderr.isatty() else ""  # and the cursor is back
    try:
        os.write(2, f"{clear}{text}\n".encode())
    except OSError as error:
        if error.errno == errno.EIO:  # the terminal was closed: what is still shown must not keep the state from disk
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)


def _heard() -> list[int]:
    """The signals that end this process: all, but for a SIGHUP that `nohup` keeps from it."""
    return [number for number in ENDING if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN]


def _name(number: int) -> str:
    return "interrupted" if number == signal.SIGINT else signal.Signals(number).name
