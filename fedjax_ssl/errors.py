"""The two errors that a user can get: a request that cannot be fulfilled, and a training that failed."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """What the user asked for cannot be done: a bad field, missing data, a workdir of another run.

    The message is one line that says what is wrong and, if possible, what to do. The command
    line prints it and exits with status 2; nothing has been written by then.
    """


class TrainingError(RuntimeError):
    """The training itself failed: the global state is not finite, or every upload of a round was dropped.

    The command line prints the message and exits with status 3; the last good checkpoint is kept.
    """


class BusyError(UserError):
    """Another process is using this workdir."""


def nearest(word: str, known: Iterable[str]) -> str:
    """What a message says of a word that may be mistyped: '; the nearest is ...', or '' where none is like it."""
    found = difflib.get_close_matches(word, known, n=1)
    return f"; the nearest is {found[0]}" if found else ""


def printable(text: str) -> str:
    """A text that may come from anywhere, such as a folder's name, in letters that a page and a line can hold.

    Control characters, those that turn the direction of writing, and bytes that are no UTF-8 become escapes.
    """
    joiners = "\u200c\u200d"  # without which some scripts and emoji fall apart
    return "".join(
        letter if letter.isprintable() or letter in joiners else letter.encode("unicode_escape").decode()
        for letter in text
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message that is not empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
