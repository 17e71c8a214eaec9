"""Messages of a run: `--quiet` and `--verbose` select those on stderr; run.log has all of them."""

import contextlib
import logging
import logging.handlers
import pathlib
import sys
from collections.abc import Iterable, Iterator

from fedjax_ssl.base.errors import first_line

# Warnings, errors; also long tasks; also each program, round, checkpoint.
QUIET, NORMAL, VERBOSE = logging.WARNING, logging.INFO, logging.DEBUG
_NOTE = VERBOSE - 1  # never shown
_FORMAT = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")


class _Screen(logging.Handler):
    """Prints on stderr, which a progress bar replaces meanwhile by one that prints above it.

    Rich's own handler would break lines after 80 columns where there is no terminal.
    """

    def emit(self, record: logging.LogRecord) -> None:
        show(record.getMessage())


class _File(logging.FileHandler):
    """A run.log. If it cannot be written any more, the run goes on: the records will notice a full disk."""

    def handleError(self, record: logging.LogRecord) -> None:
        del record

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it tries again to write what did not fit
            super().close()


_logger = logging.getLogger("fedjax_ssl")
_logger.setLevel(_NOTE)
_logger.propagate = False
_screen = _Screen(NORMAL)
_early = logging.handlers.BufferingHandler(sys.maxsize)  # lines so far, for a run.log that is opened later
_logger.addHandler(_screen)
_given: set[pathlib.Path] = set()  # the run.log files that contain them


def set_level(level: int) -> None:
    """Sets the level that is shown: `QUIET`, `NORMAL` or `VERBOSE`. run.log always gets everything."""
    _screen.setLevel(level)


def shows(level: int) -> bool:
    """Whether lines of a level are shown."""
    return level >= _screen.level


def say(text: str, level: int = NORMAL) -> None:
    """Prints a line on stderr if its level is shown, and writes it to run.log."""
    _logger.log(level, "%s", text)


def show(text: str) -> None:
    """Prints a line on stderr. If its reader has ended, nothing happens: a run does not need to be seen."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Prints a warning, at every level."""
    say(f"warning: {text}", QUIET)


def note(text: str) -> None:
    """Writes a line to run.log only."""
    say(text, _NOTE)


def begin() -> None:
    """Marks the beginning of a run: its run.log contains all messages from here on."""
    _early.flush()
    _given.clear()
    _logger.addHandler(_early)


@contextlib.contextmanager
def logged(paths: Iterable[pathlib.Path]) -> Iterator[None]:
    """A context in which messages are appended to these files, beginning with those since `begin`.

    Raises an OSError if a file cannot be opened. If writing fails later, the run continues.
    """
    _logger.removeHandler(_early)
    with contextlib.ExitStack() as stack:
        stack.callback(_logger.addHandler, _early)
        for path in paths:
            file = stack.enter_context(contextlib.closing(_File(path, delay=False)))
            file.setFormatter(_FORMAT)
            for record in [] if path in _given else _early.buffer:
                file.handle(record)
            _given.add(path)
            _logger.addHandler(file)
            stack.callback(_logger.removeHandler, file)
        try:
            yield
        except BaseException as error:
            say(f"ended by {type(error).__name__}: {first_line(error)}", _NOTE)
            raise
