"""Many runs from one file: methods, values of fields and seeds, with a table that grows as runs finish.

A sweep file has a function `get_sweep()` that returns a `Sweep`; see configs/sweeps/. The argument of a function such
as `get_sweep(dataset="cifar10")` is the text after the file's colon, as in FILE:cifar100. A run's folder is
WORKDIR/METHOD/VALUES/seed_N. A sweep that is started again skips finished runs and resumes the others. The same
command may run several times at once, on several cores or machines: each process takes runs that no other is training.

With `Sweep.warm_up`, methods that begin with the same trained model share its training: a run for each combination of
values and each seed comes first, in WORKDIR/warm_up/VALUES/seed_N, and every row begins with its model.
"""

import fnmatch
import functools
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence

from fedjax_ssl.config import measured_each_round
from fedjax_ssl.errors import TrainingError, UserError
from fedjax_ssl.files import expanded, replace_file
from fedjax_ssl.records.workdir import REPORT, ROWS, refuse_links, refuse_others
from fedjax_ssl.report.look import to_csv, to_markdown, write_tables
from fedjax_ssl.report.table import LAST
from fedjax_ssl.run.observe.log import QUIET, say
from fedjax_ssl.sweep.plan import Cell, Sweep, by_argument, is_finished, load_sweep, plan, progress_of, warm_ups_of
from fedjax_ssl.sweep.search import Search, row_and_number, tries_of, with_best
from fedjax_ssl.sweep.work import finish, run_name, work_on

__all__ = ["Cell", "Sweep", "by_argument", "load_sweep", "plan", "progress_of", "run_sweep", "warm_ups_of"]

TRIES = "tries"  # the folder of the tries of all rows


def run_sweep(
    sweep_file: str,
    workdir: str | os.PathLike[str] | None,
    overrides: Sequence[str] = (),
    dry_run: bool = False,
    rows: str = "*",
    tries: int = 0,
) -> list[Cell]:
    """Trains unfinished runs, cell by cell, and updates WORKDIR/table.md, .csv and .tex, and table_runs.csv.

    Args:
        sweep_file: path of a Python file with `get_sweep()`, and after a colon its argument.
        workdir: the sweep's folder.
        overrides: words like '--config.num_rounds=2', for all runs; none may name a field in which rows differ.
        dry_run: lists the runs without running them.
        rows: names of the rows to run, with `*` and `?` as in file names; `;` between several. The table keeps the
            finished runs of the others.
        tries: number of tries for each row, which is then run with the fields of its best try; see
            `fedjax_ssl.sweep.search`. The tries are in WORKDIR/tries, and their table is WORKDIR/tries.csv.

    Returns:
        The cells that were to be run.

    Raises:
        UserError: the file, a field or the folder is not usable; nothing has been written.
        TrainingError: one run or more failed; the others are finished and in the table.
        StoppedError: the disk is full or fails; the same command resumes the sweep.
    """
    if tries < 0:
        raise UserError(f"the number of tries must be 0 or more, not {tries}")
    if workdir is None:
        raise UserError("a sweep needs a --workdir, where it goes on when it is started again")
    root = expanded(workdir)
    refuse_others(root, ROWS)
    sweep = load_sweep(sweep_file)
    names = [name for name in sweep.methods if any(fnmatch.fnmatchcase(name, row) for row in rows.split(";"))]
    if not names:
        raise UserError(f"the sweep has no row {rows!r}; its rows: {'; '.join(sweep.methods)}")
    failures: dict[str, str] = {}
    tried: list[Cell] = []
    if tries:
        _refuse_links(plan(sweep, root, overrides), root)  # an error of the rows must come before the tries
        tried = _plan_tries(sweep, root / TRIES, overrides, tries)
        asked = [cell for cell in tried if row_and_number(cell.name)[0] in names]
        if dry_run:
            _list(asked)
        else:
            _refuse_links(warm_ups_of(asked) + asked, root / TRIES)
            for needed in (warm_ups_of(asked), asked):
                failures |= finish(needed, root / TRIES, lambda: None, "before the rows")
        found = {cell.name: float(run.accuracy()[-LAST:].mean()) for cell in tried for run in cell.row().runs}
        if not dry_run:
            write_tries(root, sweep.search, tried, found)
        sweep = sweep._replace(methods=with_best(sweep.methods, sweep.search, tries, found, say))
    table = plan(sweep, root, overrides)
    cells = [cell for cell in table if cell.name in names]
    warm_ups = warm_ups_of(cells)
    if dry_run:
        _list(warm_ups + cells)
        return cells
    _refuse_links(warm_ups + cells, root)
    update_table = functools.partial(write_table, root, sweep, table)
    failures |= finish(warm_ups, root, update_table, "warm-up")
    for number, cell in enumerate(cells, start=1):
        ready = tuple(seed for seed in cell.seeds if cell.warm_up is None or is_finished(cell.warm_up, seed))
        for seed in set(cell.seeds) - set(ready):
            failures[run_name(cell, seed)] = "its warm-up failed"
        failures.update(work_on(cell, ready, root, update_table, f"{number} of {len(cells)}"))
    print(update_table(), end="")
    if shown := [run.folder for cell in table for run in cell.row().runs]:
        from fedjax_ssl.report.comparison import write_comparison

        page = write_comparison([root], root / REPORT, sweep.target_accuracy, table_name="", only=shown)
        say(f"report {page}")
    if failures:
        for name, why in failures.items():
            say(f"failed: {name}: {why}", QUIET)
        number = sum(len(cell.seeds) for cell in [*tried, *warm_ups, *cells])
        raise TrainingError(f"{len(failures)} of {number} runs of the sweep")
    return cells


def write_table(workdir: pathlib.Path, sweep: Sweep, cells: list[Cell]) -> str:
    """Rewrites the table's files from the finished runs; returns the Markdown."""
    workdir.mkdir(parents=True, exist_ok=True)
    rows = {cell.folder.relative_to(workdir).as_posix(): cell.path_name() for cell in cells}
    replace_file(workdir / ROWS, json.dumps(rows, indent=2) + "\n")
    return to_markdown(write_tables(workdir / "table", [cell.row() for cell in cells], sweep.target_accuracy))


def write_tries(workdir: pathlib.Path, search: Search, cells: list[Cell], accuracies: Mapping[str, float]) -> None:
    """Writes WORKDIR/tries.csv: each try's validation accuracy in percent and the fields of the search.

    A try that is not finished or diverged has no accuracy. Fields that its row does not draw are empty.
    """
    fields = sorted({field for cell in cells for field in search.of(row_and_number(cell.name)[0])})
    lines = []
    for cell in cells:
        row, number = row_and_number(cell.name)
        accuracy = 100 * accuracies.get(cell.name, math.nan)
        line = {"row": row, "try": number, "validation accuracy": f"{accuracy:.3f}" if math.isfinite(accuracy) else ""}
        drawn = {field: functools.reduce(getattr, field.split("."), cell.config) for field in search.of(row)}
        lines.append(line | {field: drawn.get(field, "") for field in fields})
    replace_file(workdir / "tries.csv", to_csv(lines))


def _plan_tries(sweep: Sweep, workdir: pathlib.Path, overrides: Sequence[str], number: int) -> list[Cell]:
    """The cells of the tries. Fields of the grid have their first value, so all columns of the table share the tries.

    Raises:
        UserError: the sweep has nothing to draw, draws a field of its grid, or has no validation images for tries.
    """
    if sweep.search is None:
        raise UserError("the sweep's file has no `search` from which --tries could draw")
    drawn = {field for name in sweep.methods for field in sweep.search.of(name)}
    if in_grid := sorted(drawn & set(sweep.fields)):
        raise UserError(f"the sweep's search draws {in_grid[0]}, which is a column of its table")
    first = {field: values[:1] for field, values in sweep.fields.items()}
    methods = tries_of(sweep.methods, sweep.search, number)
    cells = plan(sweep._replace(methods=methods, fields=first, seeds=(sweep.search.seed,)), workdir, overrides)
    if any(measured_each_round(cell.config) != "validation" for cell in cells):
        raise UserError("the tries of a sweep need validation images; set data.validation in its search's fields")
    return cells


def _list(cells: list[Cell]) -> None:
    """Prints the runs of some cells with their status."""
    for cell in cells:
        for seed in cell.seeds:
            print(f"{cell.folder / f'seed_{seed}'}  {progress_of(cell, seed)}")


def _refuse_links(cells: list[Cell], root: pathlib.Path) -> None:
    """Raises a UserError if a folder of some cells is a link."""
    refuse_links(place for cell in cells for place in (cell.folder, *cell.folder.parents) if root in place.parents)
