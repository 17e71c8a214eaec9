"""Many runs from one file: methods, values of fields and seeds, with a table that grows as runs finish.

A sweep file has a function `get_sweep()` that returns a `Sweep`; see configs/sweeps/. The argument of a function such
as `get_sweep(dataset="cifar10")` is the text after the file's colon, as in FILE:cifar100. A run's folder is
WORKDIR/METHOD/VALUES/seed_N. A sweep that is started again skips finished runs and resumes the others. The same
command may run several times at once, on several cores or machines: each process takes runs that no other is training.

With `Sweep.warm_up`, methods that begin with the same trained model share its training: a run for each combination of
values and each seed comes first, in WORKDIR/warm_up/VALUES/seed_N, and every row begins with its model.
"""

import functools
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence

from fedjax_ssl.base.errors import TrainingError, UserError
from fedjax_ssl.base.files import expanded, replace_file
from fedjax_ssl.data import server_has_labels
from fedjax_ssl.records.words import measured_each_round
from fedjax_ssl.records.workdir import REPORT, ROWS, refuse_others
from fedjax_ssl.report.look import to_csv, to_markdown, write_tables
from fedjax_ssl.report.table import LAST
from fedjax_ssl.run.observe.log import QUIET, say, warn
from fedjax_ssl.sweep.plan import Cell, Sweep, by_argument, load_sweep, plan, progress_of, warm_ups_of
from fedjax_ssl.sweep.search import Search, changed, is_named, row_and_number, tries_of, with_best
from fedjax_ssl.sweep.work import finish, has_diverged, run_name, train_alike, unfinished, work_on

TRIES = "tries"  # the folder of the tries of all rows


def run_sweep(
    sweep_file: str,
    workdir: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    dry_run: bool = False,
    rows: str = "*",
    tries: int = 0,
    together: int = 1,
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
        together: the most rows or tries in one program; they train together if they differ in numbers alone.

    Returns:
        The cells that were to be run.

    Raises:
        UserError: the file, a field or the folder is not usable; nothing has been written.
        TrainingError: one run or more failed; the others are finished and in the table.
        StoppedError: the disk is full or fails; the same command resumes the sweep.
    """
    root = expanded(workdir)
    refuse_others(root, ROWS)
    sweep = load_sweep(sweep_file)
    names = [name for name in sweep.methods if any(is_named(name, row) for row in rows.split(";"))]
    if not names:
        raise UserError(f"the sweep has no row {rows!r}; its rows: {'; '.join(sweep.methods)}")
    failures, undecided, tried, asked = dict[str, str](), set[str](), list[Cell](), list[Cell]()
    if tries > 0:
        plan(sweep, root, overrides)  # an error of the rows must come before the tries
        tried = _plan_tries(sweep, root / TRIES, overrides, tries)
        asked = [cell for cell in tried if row_and_number(cell.name)[0] in names]
        if dry_run:
            _list(asked)
        else:
            failures, undecided = _finish_tries(asked, root / TRIES, together)
            write_tries(root, sweep.search, tried, accuracies_of(tried))
    planned = _planner(sweep, root, overrides, tried, tries)
    cells = [cell for cell in planned(say) if cell.name in names]
    warm_ups = warm_ups_of(cells)
    if dry_run:
        _list(warm_ups + cells)
        return cells
    decided = [cell for cell in cells if cell.name not in undecided]
    waiting = [cell for cell in cells if cell.name in undecided]
    failures |= {run_name(cell, seed): "a try of its row failed" for cell in waiting for seed in unfinished(cell)}
    update = lambda: write_table(root, sweep, planned())  # noqa: E731
    failures |= finish(_needed_warm_ups(decided), root, update, "warm-up")
    train_alike(decided, root, update, together)
    for number, cell in enumerate(decided, start=1):
        failures |= work_on(cell, root, update, f"{number} of {len(decided)}")
    print(update(), end="")
    _write_report(root, sweep.target_accuracy, planned())
    for name, why in failures.items():
        say(f"failed: {name}: {why}", QUIET)
    if failures:
        number = sum(len(cell.seeds) for cell in (*warm_ups_of(asked), *asked, *warm_ups, *cells))
        raise TrainingError(f"{len(failures)} of {number} runs of the sweep")
    return cells


def _write_report(root: pathlib.Path, target: float, cells: list[Cell]) -> None:
    """Writes the page of the table's runs, if there are any."""
    from fedjax_ssl.report.comparison import write_comparison

    if shown := [run.folder for cell in cells for run in cell.row().runs]:
        say(f"report {write_comparison([root], root / REPORT, target, table_name='', only=shown)}")


def _planner(
    sweep: Sweep, root: pathlib.Path, overrides: Sequence[str], tried: list[Cell], tries: int
) -> Callable[..., list[Cell]]:
    """Returns a function that plans the rows with the fields of their best tries, which it tells line by line.

    Other processes may finish tries meanwhile.
    """
    plans: dict[str, list[Cell]] = {}

    def planned(tell: Callable[[str], object] = lambda line: None) -> list[Cell]:
        best = with_best(sweep.methods, sweep.search, tries, accuracies_of(tried), tell)
        if repr(best) not in plans:  # planning reads the config's file, which may have been edited since
            plans[repr(best)] = plan(sweep._replace(methods=best), root, overrides)
        return plans[repr(best)]

    return planned


def write_table(workdir: pathlib.Path, sweep: Sweep, cells: list[Cell]) -> str:
    """Rewrites the table's files from the finished runs; returns the Markdown."""
    workdir.mkdir(parents=True, exist_ok=True)
    rows = {cell.folder.relative_to(workdir).as_posix(): cell.path_name() for cell in cells}
    replace_file(workdir / ROWS, json.dumps(rows, indent=2) + "\n")
    return to_markdown(write_tables(workdir / "table", [cell.row() for cell in cells], sweep.target_accuracy))


def write_tries(workdir: pathlib.Path, search: Search, cells: list[Cell], accuracies: Mapping[str, float]) -> None:
    """Writes WORKDIR/tries.csv: each try's validation accuracy in percent, if it has one, and the fields it draws."""
    workdir.mkdir(parents=True, exist_ok=True)
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

    Raises UserError if the sweep has nothing to draw, draws a field of its grid or one that all tries share, or has no
    validation images for tries.
    """
    if sweep.search is None:
        raise UserError("the sweep's file has no `search` from which --tries could draw")
    drawn = {field for name in sweep.methods for field in sweep.search.of(name)}
    if taken := sorted(drawn & {*sweep.fields, *sweep.search.fields}):
        raise UserError(f"the sweep's search draws {taken[0]}, which is a column of its table or set for all tries")
    warm_up = sweep.warm_up
    if warm_up is not None:  # holds out the images of the tries, but has its own rounds
        warm_up = changed(warm_up, {name: v for name, v in sweep.search.fields.items() if name != "num_rounds"})
    sweep = sweep._replace(
        methods=tries_of(sweep.methods, sweep.search, number),
        fields={field: values[:1] for field, values in sweep.fields.items()},
        seeds=(sweep.search.seed,),
        warm_up=warm_up,
    )
    cells = plan(sweep, workdir, overrides)
    for config in (cell.config for cell in cells):
        if measured_each_round(config) != "validation":
            raise UserError("the tries of a sweep need validation images; set data.validation in its search's fields")
        if config.personal_parts and not server_has_labels(config.data):
            raise UserError(f"tries look at the global model, whose {config.personal_parts[0]} nobody trains")
    return cells


def _finish_tries(cells: list[Cell], root: pathlib.Path, together: int) -> tuple[dict[str, str], set[str]]:
    """Trains tries after their warm-ups; returns the failures, and the rows whose best try is not decided.

    Their try failed, but did not diverge: it may succeed later and win, and runs of its row would have other fields.
    """
    failures: dict[str, str] = {}
    for needed in (_needed_warm_ups(cells), cells):
        train_alike(needed, root, lambda: None, together)
        failures |= finish(needed, root, lambda: None, "before the rows")
    failed = [(cell, failures.get(run_name(cell, seed), "")) for cell in cells for seed in cell.seeds]
    return failures, {row_and_number(cell.name)[0] for cell, why in failed if why and not has_diverged(why)}


def accuracies_of(cells: list[Cell]) -> dict[str, float]:
    """Name of a finished try -> its mean validation accuracy, a share, in the last rounds."""
    return {cell.name: float(run.accuracy()[-LAST:].mean()) for cell in cells for run in cell.row().runs}


def _needed_warm_ups(cells: list[Cell]) -> list[Cell]:
    """The warm-ups of runs that are not finished."""
    needed = {(cell.warm_up.folder, seed) for cell in cells if cell.warm_up for seed in unfinished(cell)}
    return [
        warm_up._replace(seeds=tuple(seed for seed in warm_up.seeds if (warm_up.folder, seed) in needed))
        for warm_up in warm_ups_of(cells)
    ]


def _list(cells: list[Cell]) -> None:
    """Prints the runs of some cells with their status."""
    for cell in cells:
        for seed in cell.seeds:
            print(f"{cell.folder / f'seed_{seed}'}  {progress_of(cell, seed)}")
