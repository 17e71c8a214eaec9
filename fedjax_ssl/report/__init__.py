"""Reports of one run or of several: pages, pictures and tables, from the files in their folders."""

import pathlib

from fedjax_ssl.base.errors import UserError, known_are
from fedjax_ssl.base.files import expanded
from fedjax_ssl.records.runs import find_runs
from fedjax_ssl.report import style
from fedjax_ssl.report.comparison import write_comparison
from fedjax_ssl.report.look import PLAIN, Look
from fedjax_ssl.report.run_report import write_report


def report(
    words: list[str], out: str | None, target: float, against: str | None, look: Look, size: str
) -> pathlib.Path:
    """Writes the report of one run, or, with `out`, a comparison of several; see `write_report`, `write_comparison`."""
    if size not in style.SIZES:
        raise UserError(f"pictures have no size {size!r}{known_are(size, style.SIZES)}")
    first, *others = folders = [expanded(word) for word in words]
    if out is not None:
        return write_comparison(folders, out, target, against, look=look, size=size)
    if others or find_runs(first) != [first] or against is not None or look != PLAIN:
        raise UserError("a page of several runs, a table and differences need --out=NAME.html")
    return write_report(first, size)
