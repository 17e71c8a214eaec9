"""Shows the current task and its duration."""

import contextlib
import datetime
import functools
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from fedjax_ssl.run.observe.log import NORMAL, show, shows

FIRST_LINE_SECONDS = 2.0  # without a terminal, a task that takes longer prints its text once


class Doing:
    """A task that takes time. Its text may be changed."""

    def __init__(self, text: str):
        self.text, self.since = text, time.monotonic()

    def __str__(self) -> str:
        return f"{self.text}  {datetime.timedelta(seconds=int(time.monotonic() - self.since))}"


@contextlib.contextmanager
def doing(text: str) -> Iterator[Doing]:
    """Shows a task while it runs: in a terminal a line with a clock, elsewhere a line if it takes long."""
    task = Doing(text)
    if not shows(NORMAL) or sys.stderr is None:
        yield task
    elif getattr(sys.stderr, "rich_proxied_file", sys.stderr).isatty():  # an outer task replaces stderr meanwhile
        from rich.live import Live

        with Live(get_renderable=task.__str__, console=terminal(), transient=True):
            yield task
    else:
        timer = threading.Timer(FIRST_LINE_SECONDS, lambda: show(task.text))
        timer.daemon = True
        timer.start()
        try:
            yield task
        finally:
            timer.cancel()


@functools.cache
def terminal() -> Any:
    """Rich's console on stderr, which all bars and clocks share. It is imported when something is shown."""
    from rich.console import Console

    class Terminal(Console):
        """Says no more when its reader has ended; Rich's own would end the process."""

        def on_broken_pipe(self) -> None:
            self.quiet = True

    return Terminal(stderr=True, highlight=False)
