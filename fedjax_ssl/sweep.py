"""Many runs from one file: methods, fields' values and seeds; a table that grows as runs finish.

A sweep file has a function `get_sweep()` that returns a `Sweep`; see configs/sweeps/. One that takes an argument, as
`get_sweep(dataset="cifar10")` does, gets the text behind the file's colon: FILE:cifar100. A run's folder is
WORKDIR/METHOD/VALUES/seed_N. A sweep that is started again skips finished runs and resumes the others. The same
command may run several times at once, on several cores or machines: each takes runs that no other is working on.
"""

import functools
import itertools
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from fedjax_ssl.cli.parse import call_in_file, load_config_file, overridden_fields, override
from fedjax_ssl.cli.source_docs import CONFIGS
from fedjax_ssl.config import add_section, differences, flatten, for_seed, labels_revealed, validate
from fedjax_ssl.errors import BusyError, TrainingError, UserError, known_are
from fedjax_ssl.fields import CHANGES_NO_RESULT
from fedjax_ssl.files import replace_file
from fedjax_ssl.records.runs import read_run
from fedjax_ssl.records.workdir import METRICS, REPORT, SUMMARY, read_lines
from fedjax_ssl.report.table import Row, make_table, to_csv, to_latex, to_markdown
from fedjax_ssl.run.train import train

ROOT = CONFIGS.parent


class Sweep(NamedTuple):
    """What a sweep file describes: every method with every combination of the fields' values and every seed.

    Attributes:
        config: a config file, as seen from the folder that `launch.py` lies in, or an absolute path.
        methods: a row's name in the table -> the config's arguments, or (arguments, {field: value}). A field of the
            grid that is set here has this value only: a bound that does not depend on a field is run once.
        seeds: every combination is run with each.
        fields: a field's name -> its values, a grid over all of them.
        common: fields that are set in all runs.
        target_accuracy: the table counts the rounds to this accuracy, a share, on the set that is measured each round.
    """

    config: str
    methods: Mapping[str, str | tuple[str, Mapping[str, Any]]]
    seeds: tuple[int, ...] = (0, 1, 2)
    fields: Mapping[str, tuple] = {}
    common: Mapping[str, Any] = {}
    target_accuracy: float = 0.9


class Cell(NamedTuple):
    """One row of the table: a method with one combination of values.

    Attributes:
        name: of the row.
        grid: field -> value.
        config: the configuration without its seed.
        folder: holds seed_N.
        seeds: of its runs.
    """

    name: str
    grid: dict[str, Any]
    config: ConfigDict
    folder: pathlib.Path
    seeds: tuple[int, ...]

    def title(self) -> str:
        """Name and values."""
        return ", ".join([self.name, *(f"{field} {value}" for field, value in self.grid.items())])

    def row(self) -> Row:
        """Its finished runs."""
        runs = [read_run(self.folder / f"seed_{seed}") for seed in self.seeds if is_finished(self, seed)]
        return Row(self.name, self.grid, runs, len(self.seeds), labels_revealed(self.config))


def run_sweep(
    sweep_file: str, workdir: str | os.PathLike | None, overrides: list[str] = (), dry_run: bool = False
) -> list[Cell]:
    """Runs what is not finished, cell by cell, and updates WORKDIR/table.md, table.csv and table.tex.

    Args:
        sweep_file: path of a Python file with `get_sweep()`, and after a colon its argument.
        workdir: the sweep's folder.
        overrides: words like '--config.num_rounds=2', for all runs; none may name a field in which rows differ.
        dry_run: lists the runs without running them.

    Returns:
        The cells of the table.

    Raises:
        UserError: the file, a field or the folder is not usable; nothing has been written.
        TrainingError: one run or more failed; the others are finished and in the table.
    """
    if workdir is None:
        raise UserError("a sweep needs a --workdir, where it goes on when it is started again")
    sweep = load_sweep(sweep_file)
    cells = plan(sweep, pathlib.Path(workdir), overrides)
    if dry_run:
        for cell in cells:
            for seed in sweep.seeds:
                print(f"{cell.folder / f'seed_{seed}'}  {progress_of(cell, seed)}")
        return cells
    failures, update_table = {}, functools.partial(write_table, pathlib.Path(workdir), sweep, cells)
    for number, cell in enumerate(cells, start=1):
        todo = tuple(seed for seed in sweep.seeds if not is_finished(cell, seed))
        if todo:
            place = f"{number} of {len(cells)}"
            print(f"{cell.title()} ({place}): seeds {', '.join(map(str, todo))}", file=sys.stderr, flush=True)
            failures.update(_run_cell(cell, todo, update_table))
            jax.clear_caches()  # the next cell has other programs
    print(update_table(), end="")
    if any(cell.row().runs for cell in cells):
        from fedjax_ssl.report.comparison import write_comparison

        page = write_comparison([workdir], pathlib.Path(workdir) / REPORT, sweep.target_accuracy)
        print(f"report {page}", file=sys.stderr)
    if failures:
        for name, why in failures.items():
            print(f"failed: {name}: {why}", file=sys.stderr)
        raise TrainingError(f"{len(failures)} of {len(cells) * len(sweep.seeds)} runs of the sweep")
    return cells


def load_sweep(sweep_file: str) -> Sweep:
    """The result of `get_sweep` of a Python file; the part behind a colon is its argument."""
    sweep = call_in_file(sweep_file, "get_sweep")
    if not isinstance(sweep, Sweep):
        raise UserError(f"get_sweep of {sweep_file} must return a fedjax_ssl.sweep.Sweep")
    if not sweep.seeds or len(set(sweep.seeds)) < len(sweep.seeds):
        raise UserError(f"the seeds of {sweep_file} must be different, and at least one")
    return sweep


def of_dataset(datasets: Mapping[str, Any], name: str) -> Any:
    """The entry of a sweep file for the data set that its argument names.

    Raises:
        UserError: it does not know the data set.
    """
    if name not in datasets:
        raise UserError(f"the sweep has no data set {name!r}{known_are(name, datasets)}")
    return datasets[name]


def plan(sweep: Sweep, workdir: pathlib.Path, overrides: list[str] = ()) -> list[Cell]:
    """The cells of the table with their configurations, all of them checked.

    Raises:
        UserError: a name, a field or a value is wrong, an override names a field in which rows differ, or two cells
            would share a folder.
    """
    cells = []
    for name, method in sweep.methods.items():
        arguments, own_fields = (method, {}) if isinstance(method, str) else method
        axes = [(own_fields[field],) if field in own_fields else values for field, values in sweep.fields.items()]
        for values in itertools.product(*axes):
            grid = dict(zip(sweep.fields, values))
            config = load_config_file(f"{ROOT / sweep.config}:{arguments}")
            fields = {**sweep.common, **own_fields, **grid}
            for field in sorted(fields, key=lambda field: field != "method"):  # whose section the others may be of
                _set(config, field, fields[field])
            config.log.report = False  # the sweep's report has all runs; an override brings each run's back
            folder = workdir / _slug(name) / _slug(",".join(f"{k.rpartition('.')[2]}={v}" for k, v in grid.items()))
            cells.append(Cell(name, grid, config, folder, sweep.seeds))
    if len({cell.folder for cell in cells}) < len(cells):
        raise UserError("two rows of the sweep would share a folder: their names are too much alike")
    _check_overrides(sweep, cells, overrides)
    cells = [cell._replace(config=override(cell.config, list(overrides))) for cell in cells]
    for cell in cells:
        validate(cell.config)
    return cells


def write_table(workdir: pathlib.Path, sweep: Sweep, cells: list[Cell]) -> str:
    """Rewrites the table's three files from the finished runs; returns the Markdown."""
    table = make_table([cell.row() for cell in cells], sweep.target_accuracy)
    workdir.mkdir(parents=True, exist_ok=True)
    for name, write in {"table.csv": to_csv, "table.md": to_markdown, "table.tex": to_latex}.items():
        replace_file(workdir / name, write(table))
    return to_markdown(table)


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
    lines = read_lines(cell.folder / f"seed_{seed}" / METRICS)
    return f"begun, {len(lines)} of {cell.config.num_rounds} rounds" if lines else "to do"


def _run_cell(cell: Cell, seeds: tuple[int, ...], on_finish: Callable[[], object]) -> dict[str, str]:
    """Trains a cell's seeds with one compilation; if that fails, one by one, so that a failure ends no other run.

    Args:
        cell: a row of the table.
        seeds: those to train.
        on_finish: called when a run is over.

    Returns:
        The runs that failed, with the reasons. Runs that another process is working on are left to it.
    """
    attempts, failures = [seeds], {}
    while attempts:
        attempt = attempts.pop(0)
        config = cell.config.copy_and_resolve_references()
        config.seeds = attempt
        try:
            train(config, cell.folder, on_finish)
        except BusyError:
            print(f"{cell.title()}: left to another process", file=sys.stderr, flush=True)
        except Exception as error:  # of any kind: the other runs go on
            if len(attempt) > 1:
                attempts = [(seed,) for seed in attempt if not is_finished(cell, seed)]
            else:
                failures[f"{cell.title()}, seed {attempt[0]}"] = " ".join(f"{type(error).__name__}: {error}".split())
    return failures


def _check_overrides(sweep: Sweep, cells: list[Cell], overrides: list[str]) -> None:
    """Refuses overrides of fields in which rows differ: the table would have wrong names.

    Raises:
        UserError: it names a field of the grid, one that a method sets itself, by its arguments too, or the seeds.
    """
    own = {field for method in sweep.methods.values() if not isinstance(method, str) for field in method[1]}
    flat = [flatten(cell.config) for cell in cells]
    for field in overridden_fields(overrides):
        differs = any(fields.get(field) != flat[0].get(field) for fields in flat)
        if differs or field in {"seed", "seeds", *sweep.fields, *own}:
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
    return re.sub(r"[^A-Za-z0-9=.,+-]+", "_", text).strip("_")
