"""Messages of a run: `--quiet` and `--verbose` select those on stderr; run.log has all of them."""

import contextlib
import datetime
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import IO

from fedjax_ssl.errors import first_line

QUIET, NORMAL, VERBOSE = range(3)  # warnings, errors; also long tasks; also each program, round, checkpoint

_level = NORMAL
_files: list[IO[str]] = []
_lines: list[str] = []  # of the command so far, for a run.log that is opened later
_given: set[pathlib.Path] = set()  # the run.log files that contain them


def set_level(level: int) -> None:
    """Sets the level that is shown: `QUIET`, `NORMAL` or `VERBOSE`. run.log always gets everything."""
    global _level
    _level = level


def shows(level: int) -> bool:
    """Whether lines of a level are shown."""
    return _level >= level


def say(text: str, level: int = NORMAL) -> None:
    """Prints a line on stderr if its level is shown, and writes it to run.log."""
    note(text)
    if shows(level):
        show(text)


def show(text: str) -> None:
    """Prints a line on stderr. If its reader has ended, nothing happens: a run does not need to be seen."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Prints a warning, at every level."""
    say(f"warning: {text}", QUIET)


def note(text: str) -> None:
    """Writes a line to run.log only."""
    line = f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S} {text}\n"
    if not _files:
        _lines.append(line)
    for file in _files:
        _write(file, line)


def begin() -> None:
    """Marks the beginning of a run: its run.log contains all messages from here on."""
    _lines.clear()
    _given.clear()


@contextlib.contextmanager
def logged(paths: Iterable[pathlib.Path]) -> Iterator[None]:
    """A context in which messages are appended to these files, beginning with those since `begin`.

    Raises:
        OSError: a file cannot be opened. If writing fails later, the run continues.
    """
    with contextlib.ExitStack() as stack:
        for path in paths:
            file = path.open("a")
            stack.callback(_close, file)
            _write(file, "" if path in _given else "".join(_lines))
            _given.add(path)
            _files.append(file)
            stack.callback(_files.remove, file)
        try:
            yield
        except BaseException as error:
            note(f"ended by {type(error).__name__}: {first_line(error)}")
            raise


def _write(file: IO[str], text: str) -> None:
    with contextlib.suppress(OSError, UnicodeError):  # the records will notice a full disk
        file.write(text)
        file.flush()


def _close(file: IO[str]) -> None:
    with contextlib.suppress(OSError):  # it tries again to write what did not fit
        file.close()
