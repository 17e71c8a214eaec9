"""What a sweep file describes, and its runs: a cell for each row of the table."""

import contextlib
import itertools
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from fedjax_ssl.base.errors import UserError, known_are
from fedjax_ssl.base.fields import CHANGES_NO_RESULT
from fedjax_ssl.base.files import CONFIGS, expanded
from fedjax_ssl.config import (
    add_section,
    base_config,
    call_in_file,
    differences,
    flatten,
    for_seed,
    load_config_file,
    overridden_fields,
    override,
)
from fedjax_ssl.records.lines import METRICS, SUMMARY, read_rounds
from fedjax_ssl.records.runs import RunRecords, read_run
from fedjax_ssl.records.words import labels_revealed
from fedjax_ssl.records.workdir import as_decided
from fedjax_ssl.report.table import Row
from fedjax_ssl.run.validation import validate
from fedjax_ssl.sweep.search import LogUniform, Search

ROOT = CONFIGS.parent
WARM_UP = "warm up"  # the name of warm-up cells, which are not in the table


class Sweep(NamedTuple):
    """What a sweep file describes: every method with every combination of the fields' values and every seed."""

    # A config file, relative to the folder of `launch.py` or absolute; after a colon, arguments of all rows, which come
    # before the rows' own arguments.
    config: str
    # A row's name in the table -> the config's arguments, or (arguments, {field: value}). If a row sets a field of the
    # grid, it has this value only: an upper bound that does not depend on the field is run once.
    methods: Mapping[str, str | tuple[str, Mapping[str, Any]]]
    seeds: tuple[int, ...] = (0, 1, 2)  # every combination is run with each
    fields: Mapping[str, tuple[Any, ...]] = {}  # a field's name -> its values, a grid over all of them
    common: Mapping[str, Any] = {}  # fields that are set in all runs
    # The table counts the rounds to this accuracy, a share, on the set that is measured each round.
    target_accuracy: float = 0.9
    # The run whose model all rows begin with, in the form of an entry of `methods`; None: rows begin with fresh
    # weights. It also has the sweep's common fields. It does not affect a row that sets `init_from`, such as to ''.
    warm_up: str | tuple[str, Mapping[str, Any]] | None = None
    search: Search | None = None  # what `--tries=N` draws for each row, see `fedjax_ssl.sweep.search`


class Cell(NamedTuple):
    """One row of the table: a method with one combination of values."""

    name: str  # of the row
    grid: dict[str, Any]  # field -> value
    config: ConfigDict  # the configuration without its seed
    folder: pathlib.Path  # holds seed_N
    seeds: tuple[int, ...]  # of its runs
    warm_up: "Cell | None" = None  # the cell, outside of the table, whose models its runs begin with

    def title(self) -> str:
        """Name and values."""
        return ", ".join([self.name, *(f"{field} {value}" for field, value in self.grid.items())])

    def path_name(self) -> str:
        """Name and values, as reports show them instead of the runs' folder."""
        values = ", ".join(f"{field}={value}" for field, value in _short(self.grid).items())
        return "/".join(filter(None, [self.name, values.replace("_", " ")]))

    def row(self) -> Row:
        """The row of the table, with the finished runs."""
        runs = [read_run(self.folder / f"seed_{seed}") for seed in self.seeds if is_finished(self, seed)]
        return Row(self.name, self.grid, runs, len(self.seeds), labels_revealed(self.config))


def load_sweep(sweep_file: str) -> Sweep:
    """The result of `get_sweep` in a Python file; the part after a colon is its argument.

    Raises UserError if there is no such file or function, or an entry of the sweep is not usable.
    """
    sweep = call_in_file(sweep_file, "get_sweep")
    if not isinstance(sweep, Sweep):
        raise UserError(f"get_sweep of {sweep_file} must return a fedjax_ssl.sweep.Sweep")
    try:
        if mistake := next(_mistakes(sweep), None):
            raise UserError(mistake)
        config = base_config()
        _set(config, "seeds", tuple(sweep.seeds))
        validate(config)
    except (UserError, AttributeError, TypeError) as error:
        raise UserError(f"{sweep_file}: {error}") from error
    return sweep


def _mistakes(sweep: Sweep) -> Iterator[str]:
    """Mistakes that nothing else would notice in time. `plan` checks the fields and their values."""
    search = Search({}, {}) if sweep.search is None else sweep.search
    rows: dict[str, Any] = {**sweep.methods, WARM_UP: sweep.warm_up or ""}
    for name, row in rows.items():
        match row:
            case str() | (str(), Mapping()):
                continue
        yield f"the row {name!r} must be a config's arguments or (arguments, {{field: value}}), not {row!r}"
    grids = [*sweep.fields.items(), *(pair for space in search.space.values() for pair in space.items())]
    for field, values in [("seeds", sweep.seeds), *grids]:
        if not isinstance(values, tuple | list | range) or not values:
            yield f"the values of {field} must be a tuple, as in (1,) or (1, 2), not {values!r}"
        if isinstance(values, LogUniform) and not 0 < values.low <= values.high < math.inf:
            yield f"the range of {field} must be numbers with 0 < low <= high, not {values}"
    own = {field for row in rows.values() for field in _own_fields(row)}
    if {"seed", "seeds"} & {*own, *dict(grids), *sweep.common, *search.fields}:
        yield "seeds are no field of a sweep: all rows have those of its entry `seeds`"
    if sweep.search and search.seed in sweep.seeds:
        yield f"search.seed must be one that no row has as a seed, not {search.seed!r}"
    if not 0 < sweep.target_accuracy <= 1:
        yield f"target_accuracy must be a share above 0 and at most 1, not {sweep.target_accuracy!r}"


def by_argument(choices: Mapping[str, Any], name: str) -> Any:
    """Looks up the argument of a sweep file, such as a data set or the name of some rows.

    Raises UserError if the sweep file has no such argument.
    """
    if name not in choices:
        raise UserError(f"the sweep has no argument {name!r}{known_are(name, choices)}")
    return choices[name]


def plan(sweep: Sweep, workdir: pathlib.Path, overrides: Sequence[str] = ()) -> list[Cell]:
    """The cells of the table with their configurations, all of them checked.

    Raises UserError if a name, a field or a value is wrong, an override names a field in which rows differ, or two
    cells would share a folder.
    """
    cells = []
    for name, method in sweep.methods.items():
        own = _own_fields(method)
        axes = [(own[field],) if field in own else values for field, values in sweep.fields.items()]
        grids = [dict(zip(sweep.fields, values)) for values in itertools.product(*axes)]
        cells += [_cell(sweep, workdir, name, method, grid) for grid in grids]
    _check_overrides(sweep, cells, overrides)
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


def is_finished(cell: Cell, seed: int) -> bool:
    """Whether a run has a summary of its last round, for this configuration."""
    folder = cell.folder / f"seed_{seed}"
    if not (folder / SUMMARY).exists():
        return False
    try:
        run = read_run(folder)
    except UserError:  # training reports what is wrong, and the other runs go on
        return False
    return run.is_finished and not _others(cell, seed, run)


def _others(cell: Cell, seed: int, run: RunRecords) -> list[str]:
    """The fields that a run in this folder has otherwise."""
    new = as_decided(for_seed(cell.config, seed).to_dict(), run.about)
    return sorted(set(differences(run.config, new)) - set(CHANGES_NO_RESULT))


def progress_of(cell: Cell, seed: int) -> str:
    """The status of a run, in a few words."""
    if is_finished(cell, seed):
        return "finished"
    folder = cell.folder / f"seed_{seed}"
    lines = read_rounds(folder / METRICS).lines
    if not lines:
        return "to do"
    with contextlib.suppress(UserError):  # training reports what is wrong
        if others := _others(cell, seed, read_run(folder)):
            return f"a run of another configuration ({', '.join(others)}); remove it or choose another workdir"
    return f"begun, {len(lines)} of {cell.config.num_rounds} rounds"


def _cell(sweep: Sweep, workdir: pathlib.Path, name: str, method: str | tuple[Any, ...], grid: dict[str, Any]) -> Cell:
    """A method with one combination of values."""
    arguments = method if isinstance(method, str) else method[0]
    path, _, shared = sweep.config.partition(":")
    arguments = ",".join(filter(None, (shared, arguments)))
    config = load_config_file(f"{ROOT / expanded(path)}{':' if arguments else ''}{arguments}")
    fields = {**sweep.common, **_own_fields(method), **grid}
    for field in sorted(fields, key=lambda field: field != "method"):  # first: other fields may be in its section
        _set(config, field, fields[field])
    config.log.report = False  # the sweep's report has all runs; an override turns each run's report on again
    folder = workdir / (_slug(name) or "row") / _slug(",".join(f"{k}={v}" for k, v in _short(grid).items()))
    return Cell(name, grid, config, folder, sweep.seeds)


def _own_fields(method: str | tuple[Any, ...]) -> Mapping[str, Any]:
    return {} if isinstance(method, str) else method[1]


def _warmed_up(sweep: Sweep, workdir: pathlib.Path, cell: Cell) -> Cell:
    """Lets a row begin with the warm-up model for its values, unless it has an `init_from` of its own."""
    if sweep.warm_up is None or "init_from" in {**sweep.common, **_own_fields(sweep.methods[cell.name])}:
        return cell
    set_by_it = {field: value for field, value in _own_fields(sweep.warm_up).items() if field in sweep.fields}
    warm_up = _cell(sweep, workdir, WARM_UP, sweep.warm_up, {**cell.grid, **set_by_it})
    # Relative to the sweep's folder, so that the rows' configurations do not depend on its location.
    cell.config.init_from = warm_up.folder.relative_to(workdir).as_posix()
    return cell._replace(warm_up=warm_up)


def _check_overrides(sweep: Sweep, cells: list[Cell], overrides: Sequence[str]) -> None:
    """Raises UserError for fields in which rows differ, even by their arguments: the table would have wrong names."""
    own = {field for method in sweep.methods.values() for field in _own_fields(method)}
    own |= {"seed", "seeds", *sweep.fields} | ({"init_from"} if sweep.warm_up is not None else set())
    flat = [flatten(cell.config) for cell in cells] if overrides else []
    for field in overridden_fields(overrides):
        if field in own or any(fields.get(field) != flat[0].get(field) for fields in flat):
            raise UserError(f"rows of the sweep have values of their own for config.{field}: change it in the file")


def _set(config: ConfigDict, field: str, value: Any) -> None:
    try:
        if isinstance(value, Mapping):
            raise TypeError("name the fields of a section one by one")
        config.update_from_flattened_dict({field: value})
        add_section(config)
    except UserError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"the sweep sets {field} to {value!r}: {' '.join(str(error).split())}") from error


def _short(grid: Mapping[str, Any]) -> dict[str, Any]:
    """A grid's values by their fields' last names; by the whole name where two fields share the last."""
    lasts = [field.rpartition(".")[2] for field in grid]
    return {last if lasts.count(last) == 1 else field: grid[field] for field, last in zip(grid, lasts)}


def _slug(text: str) -> str:
    """Converts a text to a folder's name."""
    return re.sub(r"[^\w=.,+-]+", "_", text.replace(", ", " ")).strip("_")
