"""Reports of one run or of several: pages, pictures and tables, from the files in their folders."""

import pathlib

from fedjax_ssl.base.errors import UserError, known_are
from fedjax_ssl.base.files import expanded
from fedjax_ssl.records.runs import find_runs
from fedjax_ssl.report import style
from fedjax_ssl.report.comparison import write_comparison
from fedjax_ssl.report.look import PLAIN, Look
from fedjax_ssl.report.run_report import write_report

__all__ = ["report", "write_comparison", "write_report"]


def report(
    folders: list[str],
    out: str | None = None,
    target: float = 0.9,
    against: str | None = None,
    look: Look = PLAIN,
    size: str = style.SCREEN,
) -> pathlib.Path:
    """Does what `python launch.py report` does: writes the report of one run, or a comparison of several.

    Args:
        folders: runs, or folders of runs.
        out: the comparison's page; None for the report of a single run.
        target: rounds and bytes are counted until this accuracy, a share, on the set that is measured each round.
        against: runs of one configuration, with which the others are compared; None: no differences.
        look: of the comparison's tables.
        size: of the pictures, one of `style.SIZES`.

    Returns:
        The page's path.

    Raises:
        UserError: see `write_report` and `write_comparison`.
    """
    if size not in style.SIZES:
        raise UserError(f"pictures have no size {size!r}{known_are(size, style.SIZES)}")
    folders = [str(expanded(folder)) for folder in folders]
    if out is not None:
        return write_comparison(folders, out, target, against, look=look, size=size)
    several = len(folders) > 1 or find_runs(pathlib.Path(folders[0])) != [pathlib.Path(folders[0])]
    if several or against is not None or look != PLAIN:
        raise UserError("several runs go into one page: --out=NAME.html")
    return write_report(folders[0], size)
