"""The run that this process is training, so that an error message can name the folder that resumes it."""

import contextlib
import pathlib
from collections.abc import Iterator

from fedjax_ssl.errors import StoppedError, outside_reason

_folder: pathlib.Path | None = None


@contextlib.contextmanager
def under_way(folder: pathlib.Path) -> Iterator[None]:
    """Marks that a run has begun in a folder, from which it can be resumed.

    Args:
        folder: the workdir that resumes what runs inside: a run's, or that of several seeds.

    Raises:
        StoppedError: the operating system, a file or the machine's memory ended the run.
    """
    global _folder
    _folder = folder
    try:
        yield
    except Exception as error:
        _folder = None
        reason = outside_reason(error)
        if reason is None:
            raise
        kept = f"the last checkpoint is kept, and python launch.py --workdir={folder} resumes from it"
        raise StoppedError(reason, kept, folder) from error
    # After an interruption, a BaseException, the folder stays known to those who say how to resume.
    _folder = None


def folder_under_way() -> pathlib.Path | None:
    """The workdir that resumes the current or interrupted run; None if nothing has been written."""
    return _folder
