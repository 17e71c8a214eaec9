"""Applies the rules of `config.stop` during a run; `records/ending.py` defines them."""

import time
from typing import Any

from fedjax_ssl.records.ending import SECONDS, Spent, spent
from fedjax_ssl.records.lines import METRICS
from fedjax_ssl.records.workdir import Workdir
from fedjax_ssl.run import hosts


class Stop:
    """Decides whether `config.stop` ends runs that share a program; with patience or bytes that is a single run."""

    def __init__(self, config: Any, folder: Workdir | None, most_bytes: int | None):
        """Starts the clock of `stop.seconds`.

        `folder` has the records of the rounds done; `most_bytes` are the most of a round, None if unknown.
        """
        self._options, self._most, self._began = config.stop, most_bytes, time.monotonic()
        self._every = config.eval_every
        self._reads_records = bool(self._options.patience or self._options.bytes)
        self._spent = Spent()
        if self._reads_records:
            self._spent = Spent(*hosts.from_first(lambda: list(spent(folder.read(METRICS)))))

    def next_due(self, done: int) -> int | None:
        """The next round after `done` that may be the last, so that no dispatch goes past it; None: no such round."""
        due = []
        if self._options.patience:
            due.append(done + self._every - done % self._every)
        if self._options.bytes:
            left = self._options.bytes - self._spent.used
            due.append(done + max(1, int(left // self._most) if self._most else 1))
        return min(due, default=None)

    def after(self, lines: list[list[dict[str, Any]]]) -> str:
        """Why the runs end after a dispatch, with the lines of its rounds for each run; '' if they go on."""
        if self._reads_records:
            for line in lines[0]:
                self._spent = self._spent.after(line)
        found = self._spent.reason(self._options)
        if not found and self._options.seconds:
            is_over = hosts.from_first(lambda: time.monotonic() - self._began >= self._options.seconds)
            return SECONDS if is_over else ""
        return found
