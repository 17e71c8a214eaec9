"""What a run says: lines on stderr, as many as `--quiet` and `--verbose` ask for, and all of them in run.log."""

import contextlib
import datetime
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import IO

from fedjax_ssl.errors import first_line
from fedjax_ssl.files import open_to_append

QUIET, NORMAL, VERBOSE = range(3)  # warnings and errors; what a user waits for; each program, round and checkpoint

_level = NORMAL
_files: list[IO[str]] = []
_lines: list[str] = []  # of the command so far, for a run.log that is opened later
_given: set[pathlib.Path] = set()  # the run.logs that have these


def set_level(level: int) -> None:
    """What is shown from now on: `QUIET`, `NORMAL` or `VERBOSE`. run.log has everything in any case."""
    global _level
    _level = level


def shows(level: int) -> bool:
    """Whether lines of a level are shown."""
    return _level >= level


def say(text: str, level: int = NORMAL) -> None:
    """A line on stderr, if its level is shown, and in run.log."""
    note(text)
    if shows(level):
        print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """A warning, which is always shown."""
    say(f"warning: {text}", QUIET)


def note(text: str) -> None:
    """A line in run.log alone."""
    line = f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S} {text}\n"
    if not _files:
        _lines.append(line)
    for file in _files:
        _write(file, line)


def begin() -> None:
    """A run begins: its run.log has what is said from here on."""
    _lines.clear()
    _given.clear()


@contextlib.contextmanager
def logged(paths: Iterable[pathlib.Path]) -> Iterator[None]:
    """Inside, what is said is appended to these files, and before it what was said since `begin`.

    Raises:
        OSError: a file cannot be opened. One that cannot be written to any more ends no run.
    """
    with contextlib.ExitStack() as stack:
        for path in paths:
            file = stack.enter_context(contextlib.closing(open_to_append(path)))
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
    with contextlib.suppress(OSError, UnicodeError):  # a full disk is noticed by the records
        file.write(text)
        file.flush()
