"""The run in progress, so that an error message can name the folder that resumes it."""

import contextlib
import pathlib
from collections.abc import Iterator

from fedjax_ssl.errors import StoppedError, UserError, outside_reason

_folder: pathlib.Path | None = None


@contextlib.contextmanager
def under_way(folder: pathlib.Path) -> Iterator[None]:
    """Marks that a run has begun in a folder and can be resumed from it.

    Args:
        folder: the workdir that resumes the run: the run's own, or that of several seeds.

    Raises:
        StoppedError: the operating system, a file, a lack of memory or a `UserError` ended the run.
    """
    global _folder
    _folder = folder
    try:
        yield
    except Exception as error:
        _folder = None
        reason = outside_reason(error) or (str(error) if isinstance(error, UserError) else None)
        if reason is None:
            raise
        kept = f"the last checkpoint is kept, and python launch.py --workdir={folder} resumes from it"
        raise StoppedError(reason, kept, folder) from error
    # After an interruption (a BaseException) the folder stays set, for the message that says how to resume.
    _folder = None


def folder_under_way() -> pathlib.Path | None:
    """The workdir that resumes the current or interrupted run; None: nothing has been written."""
    return _folder
