"""Many runs from one file: methods, fields' values and seeds; a table that grows as runs finish.

A sweep file has a function `get_sweep()` that returns a `Sweep`; see configs/sweeps/. One that takes an argument, as
`get_sweep(dataset="cifar10")` does, gets the text behind the file's colon: FILE:cifar100. A run's folder is
WORKDIR/METHOD/VALUES/seed_N. A sweep that is started again skips finished runs and resumes the others. The same
command may run several times at once, on several cores or machines: each takes runs that no other is working on.

Methods that all begin with the same trained model share its training: with `Sweep.warm_up` a run for each combination
of values and each seed comes first, in WORKDIR/warm_up/VALUES/seed_N, and every row begins with its model.
"""

import fnmatch
import functools
import itertools
import json
import os
import pathlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from fedjax_ssl.config import (
    add_section,
    call_in_file,
    differences,
    flatten,
    for_seed,
    labels_revealed,
    load_config_file,
    measured_each_round,
    overridden_fields,
    override,
    validate,
)
from fedjax_ssl.errors import BusyError, StoppedError, TrainingError, UserError, known_are
from fedjax_ssl.fields import CHANGES_NO_RESULT
from fedjax_ssl.files import CONFIGS, expanded
from fedjax_ssl.records.runs import read_run
from fedjax_ssl.records.workdir import METRICS, REPORT, SUMMARY, read_rounds, refuse_links
from fedjax_ssl.report.look import to_markdown, write_tables
from fedjax_ssl.report.table import LAST, Row
from fedjax_ssl.run.memory import give_back_memory
from fedjax_ssl.run.observe.log import QUIET, say
from fedjax_ssl.run.train import train
from fedjax_ssl.sweep.search import Search, row_of, tries_of, with_best

ROOT = CONFIGS.parent
TRIES = "tries"  # the folder of those of all rows
WARM_UP = "warm up"  # the name of the cells that are in no row of the table
WAIT_SECONDS = 5.0  # between two looks at a warm-up that another process is at


class Sweep(NamedTuple):
    """What a sweep file describes: every method with every combination of the fields' values and every seed."""

    # A config file, as seen from the folder that `launch.py` lies in, or an absolute path; behind a colon the arguments
    # that all rows have, before their own.
    config: str
    # A row's name in the table -> the config's arguments, or (arguments, {field: value}). A field of the grid that is
    # set here has this value only: a bound that does not depend on a field is run once.
    methods: Mapping[str, str | tuple[str, Mapping[str, Any]]]
    seeds: tuple[int, ...] = (0, 1, 2)  # every combination is run with each
    fields: Mapping[str, tuple[Any, ...]] = {}  # a field's name -> its values, a grid over all of them
    common: Mapping[str, Any] = {}  # fields that are set in all runs
    # The table counts the rounds to this accuracy, a share, on the set that is measured each round.
    target_accuracy: float = 0.9
    # The run whose model all rows begin with, given as one of `methods` is; None: rows begin with fresh weights. It has
    # the sweep's common fields too. A row with an `init_from` of its own, '' say, is left alone.
    warm_up: str | tuple[str, Mapping[str, Any]] | None = None
    search: Search | None = None  # what `--tries=N` draws for each row, see `fedjax_ssl.sweep.search`


class Cell(NamedTuple):
    """One row of the table: a method with one combination of values."""

    name: str  # of the row
    grid: dict[str, Any]  # field -> value
    config: ConfigDict  # the configuration without its seed
    folder: pathlib.Path  # holds seed_N
    seeds: tuple[int, ...]  # of its runs
    warm_up: "Cell | None" = None  # the cell, outside of the table, with whose models its runs begin

    def title(self) -> str:
        """Name and values."""
        return ", ".join([self.name, *(f"{field} {value}" for field, value in self.grid.items())])

    def row(self) -> Row:
        """Its finished runs."""
        runs = [read_run(self.folder / f"seed_{seed}") for seed in self.seeds if is_finished(self, seed)]
        return Row(self.name, self.grid, runs, len(self.seeds), labels_revealed(self.config))


def run_sweep(
    sweep_file: str,
    workdir: str | os.PathLike[str] | None,
    overrides: Sequence[str] = (),
    dry_run: bool = False,
    rows: str = "*",
    tries: int = 0,
) -> list[Cell]:
    """Runs what is not finished, cell by cell, and updates WORKDIR/table.md, .csv and .tex, and table_runs.csv.

    Args:
        sweep_file: path of a Python file with `get_sweep()`, and after a colon its argument.
        workdir: the sweep's folder.
        overrides: words like '--config.num_rounds=2', for all runs; none may name a field in which rows differ.
        dry_run: lists the runs without running them.
        rows: names of the rows to run, with `*` and `?` as in file names; `;` between several. The table keeps
            what is finished of the others.
        tries: of each row, before it is run with the fields of the best one, see `fedjax_ssl.sweep.search`. They lie in
            WORKDIR/tries.

    Returns:
        The cells that were to be run.

    Raises:
        UserError: the file, a field or the folder is not usable; nothing has been written.
        TrainingError: one run or more failed; the others are finished and in the table.
        StoppedError: the disk is full or fails; the same command resumes the sweep.
    """
    if workdir is None:
        raise UserError("a sweep needs a --workdir, where it goes on when it is started again")
    root = pathlib.Path(expanded(workdir))
    sweep = load_sweep(sweep_file)
    names = [name for name in sweep.methods if any(fnmatch.fnmatchcase(name, row) for row in rows.split(";"))]
    if not names:
        raise UserError(f"the sweep has no row {rows!r}; its rows: {'; '.join(sweep.methods)}")
    failures: dict[str, str] = {}
    tried: list[Cell] = []
    if tries:
        _refuse_links(plan(sweep, root, overrides), root)  # an error of the rows must come before the tries
        tried = _plan_tries(sweep, root / TRIES, overrides, tries)
        asked = [cell for cell in tried if row_of(cell.name) in names]
        if dry_run:
            _list(asked)
        else:
            for needed in (warm_ups_of(asked), asked):
                failures |= _finish(needed, root / TRIES, lambda: None, "before the rows")
        found = {cell.name: float(run.accuracy()[-LAST:].mean()) for cell in tried for run in cell.row().runs}
        sweep = sweep._replace(methods=with_best(sweep.methods, sweep.search, tries, found, say))
    table = plan(sweep, root, overrides)
    cells = [cell for cell in table if cell.name in names]
    warm_ups = warm_ups_of(cells)
    if dry_run:
        _list(warm_ups + cells)
        return cells
    _refuse_links(warm_ups + cells, root)
    update_table = functools.partial(write_table, root, sweep, table)
    failures |= _finish(warm_ups, root, update_table, "warm-up")
    for number, cell in enumerate(cells, start=1):
        ready = tuple(seed for seed in cell.seeds if cell.warm_up is None or is_finished(cell.warm_up, seed))
        for seed in set(cell.seeds) - set(ready):
            failures[_name(cell, seed)] = "its warm-up failed"
        failures.update(_work_on(cell, ready, root, update_table, f"{number} of {len(cells)}"))
    print(update_table(), end="")
    if any(cell.row().runs for cell in table):
        from fedjax_ssl.report.comparison import write_comparison

        page = write_comparison([workdir], root / REPORT, sweep.target_accuracy, table_name="")
        say(f"report {page}")
    if failures:
        for name, why in failures.items():
            say(f"failed: {name}: {why}", QUIET)
        number = sum(len(cell.seeds) for cell in [*tried, *warm_ups, *cells])
        raise TrainingError(f"{len(failures)} of {number} runs of the sweep")
    return cells


def _plan_tries(sweep: Sweep, workdir: pathlib.Path, overrides: Sequence[str], number: int) -> list[Cell]:
    """The cells of the tries. Fields of the grid have their first value: all columns of the table share the tries.

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


def _finish(cells: list[Cell], root: pathlib.Path, on_finish: Callable[[], object], place: str) -> dict[str, str]:
    """Runs cells that others need, and waits for those that another process is at; the failures."""
    failures: dict[str, str] = {}
    _refuse_links(cells, root)
    for cell in cells:
        failures |= _work_on(cell, cell.seeds, root, on_finish, place)
    for cell in cells:
        failures |= _wait_for(cell, root, on_finish, failures)
    return failures


def load_sweep(sweep_file: str) -> Sweep:
    """The result of `get_sweep` of a Python file; the part behind a colon is its argument."""
    sweep = call_in_file(sweep_file, "get_sweep")
    if not isinstance(sweep, Sweep):
        raise UserError(f"get_sweep of {sweep_file} must return a fedjax_ssl.sweep.Sweep")
    if not sweep.seeds or len(set(sweep.seeds)) < len(sweep.seeds):
        raise UserError(f"the seeds of {sweep_file} must be different, and at least one")
    return sweep


def by_argument(choices: Mapping[str, Any], name: str) -> Any:
    """What a sweep file has for its argument, such as a data set or the name of some rows.

    Raises:
        UserError: it has no such argument.
    """
    if name not in choices:
        raise UserError(f"the sweep has no argument {name!r}{known_are(name, choices)}")
    return choices[name]


def plan(sweep: Sweep, workdir: pathlib.Path, overrides: Sequence[str] = ()) -> list[Cell]:
    """The cells of the table with their configurations, all of them checked.

    Raises:
        UserError: a name, a field or a value is wrong, an override names a field in which rows differ, or two cells
            would share a folder.
    """
    cells = []
    for name, method in sweep.methods.items():
        own_fields = _own_fields(method)
        axes = [(own_fields[field],) if field in own_fields else values for field, values in sweep.fields.items()]
        cells += [
            _cell(sweep, workdir, name, method, dict(zip(sweep.fields, each))) for each in itertools.product(*axes)
        ]
    _check_overrides(sweep, cells, overrides)
    if sweep.warm_up is not None:
        cells = [_warmed_up(sweep, workdir, cell) for cell in cells]
    folders = [cell.folder for cell in warm_ups_of(cells) + cells]
    if len(set(folders)) < len(folders):
        raise UserError("two rows of the sweep would share a folder: their names are too much alike")

    def overridden(cell: Cell) -> Cell:
        config = override(cell.config, list(overrides))
        validate(config)
        return cell._replace(config=config, warm_up=cell.warm_up and overridden(cell.warm_up))

    return [overridden(cell) for cell in cells]


def warm_ups_of(cells: list[Cell]) -> list[Cell]:
    """The warm-ups of the rows, each once."""
    return list({cell.warm_up.folder: cell.warm_up for cell in cells if cell.warm_up}.values())


def _cell(sweep: Sweep, workdir: pathlib.Path, name: str, method: str | tuple[Any, ...], grid: dict[str, Any]) -> Cell:
    """A method with one combination of values."""
    arguments = method if isinstance(method, str) else method[0]
    path, _, shared = sweep.config.partition(":")
    config = load_config_file(f"{ROOT / path}:{','.join(filter(None, (shared, arguments)))}")
    fields = {**sweep.common, **_own_fields(method), **grid}
    for field in sorted(fields, key=lambda field: field != "method"):  # whose section the others may be of
        _set(config, field, fields[field])
    config.log.report = False  # the sweep's report has all runs; an override brings each run's back
    folder = workdir / _slug(name) / _slug(",".join(f"{k.rpartition('.')[2]}={v}" for k, v in grid.items()))
    return Cell(name, grid, config, folder, sweep.seeds)


def _own_fields(method: str | tuple[Any, ...]) -> Mapping[str, Any]:
    return {} if isinstance(method, str) else method[1]


def _warmed_up(sweep: Sweep, workdir: pathlib.Path, cell: Cell) -> Cell:
    """A row that begins with the model of the warm-up of its values, unless it has an `init_from` of its own."""
    if "init_from" in {**sweep.common, **_own_fields(sweep.methods[cell.name])}:
        return cell
    warm_up = _cell(sweep, workdir, WARM_UP, sweep.warm_up, {**cell.grid, **_of_grid(sweep, sweep.warm_up)})
    # Relative to the sweep's folder, so that the rows' configurations do not say where that lies.
    cell.config.init_from = warm_up.folder.relative_to(workdir).as_posix()
    return cell._replace(warm_up=warm_up)


def _of_grid(sweep: Sweep, method: str | tuple[Any, ...]) -> dict[str, Any]:
    """The fields of the grid that a method sets itself."""
    return {field: value for field, value in _own_fields(method).items() if field in sweep.fields}


def write_table(workdir: pathlib.Path, sweep: Sweep, cells: list[Cell]) -> str:
    """Rewrites the table's files from the finished runs; returns the Markdown."""
    workdir.mkdir(parents=True, exist_ok=True)
    return to_markdown(write_tables(workdir / "table", [cell.row() for cell in cells], sweep.target_accuracy))


def is_finished(cell: Cell, seed: int) -> bool:
    """Whether a run has its summary, of its last round and for this configuration."""
    folder = cell.folder / f"seed_{seed}"
    if not (folder / SUMMARY).exists():
        return False
    try:
        run = read_run(folder)
    except UserError:  # training reports what is wrong, and the other runs go on
        return False
    new = json.loads(json.dumps(for_seed(cell.config, seed).to_dict()))
    return run.is_finished and not set(differences(run.config, new)) - set(CHANGES_NO_RESULT)


def progress_of(cell: Cell, seed: int) -> str:
    """The status of a run, in a word or two."""
    if is_finished(cell, seed):
        return "finished"
    lines = read_rounds(cell.folder / f"seed_{seed}" / METRICS).lines
    return f"begun, {len(lines)} of {cell.config.num_rounds} rounds" if lines else "to do"


def _work_on(
    cell: Cell, seeds: tuple[int, ...], root: pathlib.Path, on_finish: Callable[[], object], place: str
) -> dict[str, str]:
    """Runs those of a cell's seeds that are not finished; the failures."""
    todo = tuple(seed for seed in seeds if not is_finished(cell, seed))
    if not todo:
        return {}
    say(f"{cell.title()} ({place}): seeds {', '.join(map(str, todo))}")
    failures = _run_cell(cell, todo, root, on_finish)
    jax.clear_caches()  # the next cell has other programs
    return failures


def _wait_for(
    cell: Cell, root: pathlib.Path, on_finish: Callable[[], object], failures: Mapping[str, str]
) -> dict[str, str]:
    """Waits until a warm-up is finished or has failed; what another process gives up is taken over."""
    failed = dict(failures)
    while True:
        todo = tuple(seed for seed in cell.seeds if not is_finished(cell, seed) and _name(cell, seed) not in failed)
        if not todo:
            return {name: why for name, why in failed.items() if name not in failures}
        time.sleep(WAIT_SECONDS)
        failed |= _work_on(cell, todo, root, on_finish, "warm-up")


def _name(cell: Cell, seed: int) -> str:
    """A run's name in the list of failures."""
    return f"{cell.title()}, seed {seed}"


def _run_cell(
    cell: Cell, seeds: tuple[int, ...], root: pathlib.Path, on_finish: Callable[[], object]
) -> dict[str, str]:
    """Trains a cell's seeds with one compilation; if that fails, one by one, so that a failure ends no other run.

    Args:
        cell: a row of the table, or a warm-up.
        seeds: those to train.
        root: the sweep's folder.
        on_finish: called when a run is over.

    Returns:
        The runs that failed, with the reasons. Runs that another process is working on are left to it.

    Raises:
        StoppedError: the disk ended a run, and would end the others.
    """
    attempts, failures = [seeds], {}
    while attempts:
        attempt = attempts.pop(0)
        config = cell.config.copy_and_resolve_references()
        config.seeds = attempt
        try:
            train(config, cell.folder, on_finish, root)
        except BusyError as error:
            # Who is at the first of these seeds will do the others. Who took a later one, while this process was at an
            # earlier one, may do that one alone.
            if error.folder in {cell.folder / f"seed_{seed}" for seed in attempt[1:]}:
                attempts = [(seed,) for seed in attempt if not is_finished(cell, seed)]
            else:
                say(f"{cell.title()}: left to another process")
        except Exception as error:  # of any kind: the other runs go on
            if isinstance(error, StoppedError) and error.by_disk:
                raise StoppedError(error.reason, "the same command resumes the sweep", root) from error
            if len(attempt) > 1:
                attempts = [(seed,) for seed in attempt if not is_finished(cell, seed)]
            else:
                failures[_name(cell, attempt[0])] = " ".join(f"{type(error).__name__}: {error}".split())
        give_back_memory()
    return failures


def _check_overrides(sweep: Sweep, cells: list[Cell], overrides: Sequence[str]) -> None:
    """Refuses overrides of fields in which rows differ: the table would have wrong names.

    Raises:
        UserError: it names a field of the grid, one that a method sets itself, by its arguments too, the seeds, or the
            model that rows begin with where a warm-up gives it.
    """
    own = {field for method in sweep.methods.values() if not isinstance(method, str) for field in method[1]}
    flat = [flatten(cell.config) for cell in cells]
    for field in overridden_fields(overrides):
        differs = any(fields.get(field) != flat[0].get(field) for fields in flat)
        shared = {"init_from"} if sweep.warm_up is not None else set()
        if differs or field in {"seed", "seeds", *sweep.fields, *own, *shared}:
            raise UserError(f"rows of the sweep have values of their own for config.{field}: change it in the file")


def _set(config: ConfigDict, field: str, value: Any) -> None:
    try:
        config.update_from_flattened_dict({field: value})
        add_section(config)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the sweep sets {field} to {value!r}: {' '.join(str(error).split())}") from error


def _slug(text: str) -> str:
    """A text as a folder's name."""
    return re.sub(r"[^A-Za-z0-9=.,+-]+", "_", text.replace(", ", " ")).strip("_")
