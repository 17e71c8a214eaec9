"""Writes a table and a page over the runs of several seeds, in the folder above theirs."""

import pathlib

from fedjax_ssl.records.groups import read_groups
from fedjax_ssl.records.workdir import REPORT, SUMMARY
from fedjax_ssl.run.observe.clock import doing
from fedjax_ssl.run.observe.log import QUIET, say


def report_seeds(folder: pathlib.Path) -> None:
    """Writes FOLDER/table.csv, .md and .tex, table_runs.csv and report.html, unless they are newer than all summaries.

    A failure is printed and does not fail the runs.

    Args:
        folder: holds seed_N, finished runs of one or several configurations.
    """
    page = folder / REPORT
    summaries = [path.stat().st_mtime_ns for path in folder.glob(f"seed_*/{SUMMARY}")]
    if page.exists() and page.stat().st_mtime_ns >= max(summaries, default=0):
        return
    with doing("loading what draws the report"):
        from fedjax_ssl.report.comparison import write_comparison
        from fedjax_ssl.report.table import OverSeeds
    try:
        with doing("drawing the report of all seeds"):
            write_comparison([folder], page, table_name="table")
        for group in read_groups([folder])[0]:
            seeds = ", ".join(str(run.config["seed"]) for run in group.runs)
            shares = [run.tested("test_accuracy") for run in group.runs]
            accuracies = OverSeeds([None if share is None else 100 * share for share in shares])
            say(f"seeds {seeds}: test accuracy {accuracies} % (mean ± standard deviation)")
        say(f"report {page}")
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        say(f"the runs are complete, but their report failed: {why}", QUIET)
