"""Errors for users: a request that cannot be fulfilled, training that failed, a run that was stopped."""

import difflib
import json
import pathlib
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator


class UserError(ValueError):
    """What the user asked for cannot be done: a bad field, missing data, a workdir of another run.

    The message is one line that says what is wrong and, if possible, what to do. The command
    line prints it and exits with status 2; nothing has been written by then.
    """


class TrainingError(RuntimeError):
    """The training itself failed: the global state is not finite, or every upload of a round was dropped.

    The command line prints the message and exits with status 3; the last good checkpoint is kept.
    """


class StoppedError(RuntimeError):
    """The operating system, a file or the memory ended a run: for example a full disk, or a folder that is gone.

    The command line prints the message and exits with status 4; the last checkpoint is kept, and the run can be
    resumed from its folder once the cause is fixed. `by_disk`: the disk was the cause, which would end other runs, too.
    """

    def __init__(self, reason: str, how_to_resume: str = "", folder: pathlib.Path | None = None):
        super().__init__("; ".join(filter(None, (reason, how_to_resume))))
        self.reason, self.folder = reason, folder
        self.by_disk = any(word in reason for word in _DISK_WORDS)


class BusyError(UserError):
    """Another process is using this workdir."""

    def __init__(self, folder: pathlib.Path):
        super().__init__(f"another process is training in the workdir {folder}")
        self.folder = folder


def errors_of(*calls: Callable[[], object]) -> list[str]:
    """The messages of the calls that raise a UserError, so that all that is wrong is told at once."""
    found = []
    for call in calls:
        try:
            call()
        except UserError as error:
            found.append(str(error))
    return found


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a word that may be mistyped: '; the nearest is ...', or '' if no known word is similar."""
    found = difflib.get_close_matches(word, known, n=1)
    return f"; the nearest is {found[0]}" if found else ""


def printable(text: str) -> str:
    """Escapes control characters, marks of the writing direction, and bytes of a file's name that are not UTF-8."""
    joiners = "\u200c\u200d"  # some scripts and emoji need them
    return "".join(
        letter if letter.isprintable() or letter in joiners else letter.encode("unicode_escape").decode()
        for letter in text
    )


def say(line: str) -> None:
    """Prints a line on the standard error, `printable`."""
    print(printable(line), file=sys.stderr, flush=True)


def shortened(text: str, most: int = 1500) -> str:
    """A text without its middle if it is longer, such as a message that repeats a long value."""
    return text if len(text) <= most else f"{text[: most - 300]} [...] {text[-300:]}"


def known_are(word: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the nearest known word, if one is similar, and all known words."""
    known = list(known)
    return f"{nearest(str(word), known)}; known: {', '.join(known)}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message that is not empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


_CODE = "os_error_code"  # in errors of TensorStore, with a number
_DISK_WORDS = (
    *("No space left on device", "Disk quota exceeded", "Input/output error", "Read-only file system"),
    *("database or disk is full", "disk I/O error"),  # of SQLite
)
# Words in errors of libraries that write files or allocate memory, and raise exceptions of their own types.
_OUTSIDE_WORDS = (*_DISK_WORDS, "File too large", "Permission denied", _CODE)
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory")
_OF_DAMAGED_FILES = (UnicodeDecodeError, json.JSONDecodeError, zipfile.BadZipFile, zlib.error, EOFError)


def outside_reason(error: BaseException) -> str | None:
    """One line if the operating system, a file or the memory caused an error or those that caused it; else None."""
    for each in causes(error):
        kind, text = type(each).__name__, first_line(each)
        if isinstance(each, OSError) and each.strerror:
            names = [str(name) for name in (each.filename, each.filename2) if name is not None]
            return ": ".join([*names[:1], each.strerror])
        if isinstance(each, OSError):  # a library raised it, with a message only
            return text
        said = [word for word in _OUTSIDE_WORDS if word in str(each)]  # before memory: a disk is a resource too
        if said:
            return said[0] if said[0] != _CODE else f"{kind}: {text[:200]}"
        if isinstance(each, MemoryError) or any(word in str(each) for word in _OUT_OF_MEMORY):
            return f"the memory does not suffice ({kind}: {text[:200]})"
        if isinstance(each, _OF_DAMAGED_FILES):
            return f"a file is damaged or of another kind ({kind}: {text})"
    return None


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and the errors that caused it, each once."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__
