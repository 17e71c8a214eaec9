"""Draws reports when runs have ended; those of several seeds get a table and a page in the folder above theirs."""

import pathlib
from collections.abc import Callable

from fedjax_ssl.records.groups import read_groups
from fedjax_ssl.records.lines import SUMMARY
from fedjax_ssl.records.workdir import REPORT
from fedjax_ssl.run.observe.clock import doing
from fedjax_ssl.run.observe.log import QUIET, say


def report_seeds(folder: pathlib.Path) -> None:
    """Writes FOLDER/table.csv, .md and .tex, table_runs.csv and report.html, unless newer than all summaries."""
    page = folder / REPORT
    summaries = [path.stat().st_mtime_ns for path in folder.glob(f"seed_*/{SUMMARY}")]
    if page.exists() and page.stat().st_mtime_ns >= max(summaries, default=0):
        return

    def write() -> pathlib.Path:
        from fedjax_ssl.report.comparison import write_comparison
        from fedjax_ssl.report.table import OverSeeds

        groups = read_groups([folder])[0]
        write_comparison([folder], page, table_name="table")
        for group in groups:
            seeds = ", ".join(str(run.config["seed"]) for run in group.runs)
            shares = [run.tested("test_accuracy") for run in group.runs]
            accuracies = OverSeeds([None if share is None else 100 * share for share in shares])
            say(f"seeds {seeds}: test accuracy {accuracies} % (mean ± standard deviation)")
        return page

    draw(write, "the report of all seeds")


def draw(write: Callable[[], pathlib.Path], what: str) -> None:
    """Draws a report of finished runs and says where it is. A failure is printed and does not fail the runs.

    `write` imports what draws, which takes seconds, and returns the page's path.
    """
    try:
        with doing(f"drawing {what}"):
            page = write()
        say(f"report {page}")
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        say(f"the training is complete, but {what} failed: {why}", QUIET)
