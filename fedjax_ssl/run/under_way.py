"""The run in progress, so that an error message can name the command that resumes it."""

import contextlib
import pathlib
from collections.abc import Iterator

from fedjax_ssl.base.errors import StoppedError, UserError, outside_reason
from fedjax_ssl.base.imports import own_error

_command: str | None = None  # that resumes the run


@contextlib.contextmanager
def under_way(folder: pathlib.Path, allow_code: bool = False) -> Iterator[None]:
    """Marks that a run has begun and can be resumed from a folder: the run's own, or that of several seeds.

    If the run names a user's code, resuming takes --allow_code. Raises a StoppedError if the operating system, a file,
    a lack of memory, a user's code or a `UserError` ended the run.
    """
    global _command
    _command = f"python launch.py --workdir={folder}{' --allow_code' if allow_code else ''}"
    try:
        yield
    except Exception as error:
        command, _command = _command, None
        reason = outside_reason(error) or (str(error) if isinstance(error, UserError) else own_error(error))
        if reason is None:
            raise
        kept = f"the last checkpoint is kept, and {command} resumes from it"
        raise StoppedError(reason, kept, folder) from error
    # After an interruption (a BaseException) the command stays set, for the message that says how to resume.
    _command = None


def resume_command() -> str | None:
    """The command that resumes the current or interrupted run; None: nothing has been written."""
    return _command
