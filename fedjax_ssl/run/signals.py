"""Signals that end a run, held back until its state is saved."""

import signal
from typing import Any


class Signals:
    """SIGINT and SIGTERM wait for the end of a dispatch; a second one of the same kind acts at once.

    Attributes:
        received: the signal that waits; None without one.
    """

    def __init__(self):
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        def remember(number, _):
            self.received = number
            signal.signal(number, self._before[number])

        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, remember)
        except ValueError:  # not in the main thread: signals are left to the caller
            pass
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def act(self) -> None:
        """Ends the run if a signal waits."""
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is not None:
            raise SystemExit(128 + self.received)
