"""Trains the cells of a sweep, one by one or several in one program.

Other processes may do the same; a run that fails does not end others.
"""

import functools
import pathlib
import time
from collections.abc import Callable, Hashable

from fedjax_ssl.base.errors import BusyError, StoppedError, TrainingError, UserError
from fedjax_ssl.base.imports import own_error
from fedjax_ssl.config import flatten, numbers_of
from fedjax_ssl.run.memory import give_back_memory
from fedjax_ssl.run.observe.log import say
from fedjax_ssl.run.train import train, train_together
from fedjax_ssl.sweep.plan import Cell, is_finished

WAIT_SECONDS = 5.0  # between checks of a run that another process trains
Say = Callable[[str], object]


def finish(cells: list[Cell], root: pathlib.Path, on_finish: Callable[[], object], place: str) -> dict[str, str]:
    """Trains cells that others need, and returns the failures.

    Waits for runs of other processes, and takes over those that they give up.
    """
    tell = functools.cache(say)  # each line once, however often a run of another process is checked
    failures: dict[str, str] = {}

    def left(cell: Cell) -> tuple[int, ...]:
        return tuple(seed for seed in unfinished(cell) if run_name(cell, seed) not in failures)

    while True:
        for cell in cells:
            failures |= work_on(cell._replace(seeds=left(cell)), root, on_finish, place, tell)
        if not any(map(left, cells)):
            return failures
        time.sleep(WAIT_SECONDS)


def work_on(
    cell: Cell, root: pathlib.Path, on_finish: Callable[[], object], place: str, tell: Say = say
) -> dict[str, str]:
    """Trains the unfinished seeds of a cell whose warm-up is finished; returns the failures."""
    todo = unfinished(cell)
    ready = tuple(seed for seed in todo if cell.warm_up is None or is_finished(cell.warm_up, seed))
    failures = {run_name(cell, seed): "its warm-up failed" for seed in todo if seed not in ready}
    if not ready:
        return failures
    tell(f"{cell.title()} ({place}): seeds {', '.join(map(str, ready))}")
    return failures | _run_cell(cell, ready, root, on_finish, tell)


def train_alike(cells: list[Cell], root: pathlib.Path, on_finish: Callable[[], object], together: int) -> None:
    """Trains up to `together` cells at a time in one program: those that differ in numbers alone and wait for nothing.

    What fails, or is trained by another process, is left unfinished: `work_on` trains it and tells why. Raises
    StoppedError if the disk ended the runs.
    """
    alike: dict[Hashable, list[Cell]] = {}
    for cell in cells:
        seeds = unfinished(cell)
        if seeds and (cell.warm_up is None or all(is_finished(cell.warm_up, seed) for seed in seeds)):
            numbers = numbers_of(cell.config).keys() - {"num_rounds"}
            fields = {name: value for name, value in flatten(cell.config).items() if name not in numbers}
            left = cell._replace(seeds=seeds)
            alike.setdefault(repr((sorted(fields.items()), sorted(numbers), seeds)), []).append(left)
    for group in alike.values():
        for number in range(0, len(group), together):
            # Another process may have finished some meanwhile.
            few = [cell for cell in group[number : number + together] if unfinished(cell) == cell.seeds]
            if len(few) > 1:
                _train_few(few, root, on_finish)


def _train_few(cells: list[Cell], root: pathlib.Path, on_finish: Callable[[], object]) -> None:
    """Trains cells in one program; if that fails, they are left unfinished."""
    configs = [cell.config.copy_and_resolve_references() for cell in cells]
    for cell, config in zip(cells, configs):
        config.seeds = cell.seeds
    say(f"together: {'; '.join(cell.title() for cell in cells)}")
    try:
        train_together(configs, [cell.folder for cell in cells], on_finish, root)
    except Exception as error:  # of any kind: the runs are tried one by one
        if isinstance(error, StoppedError) and error.by_disk:
            raise StoppedError(error.reason, "the same command resumes the sweep", root) from error
        say(f"not together: {type(error).__name__}: {' '.join(str(error).split())}")
    give_back_memory()


def unfinished(cell: Cell) -> tuple[int, ...]:
    """The seeds of a cell that have yet to be run."""
    return tuple(seed for seed in cell.seeds if not is_finished(cell, seed))


def run_name(cell: Cell, seed: int) -> str:
    """A run's name in the list of failures."""
    return f"{cell.title()}, seed {seed}"


def has_diverged(failure: str) -> bool:
    """Whether a failure is that of the training itself, which would fail again."""
    return failure.startswith(f"{TrainingError.__name__}: ")


def _run_cell(
    cell: Cell, seeds: tuple[int, ...], root: pathlib.Path, on_finish: Callable[[], object], tell: Say = say
) -> dict[str, str]:
    """Trains a cell's seeds with one compilation; if that fails, one by one, so that a failure ends no other run.

    Returns the runs that failed, with the reasons. Runs that another process is working on are left to it, with a line.
    Raises StoppedError if the disk ended a run, and would end the others.
    """
    attempts, failures = [seeds], {}
    while attempts:
        attempt = attempts.pop(0)
        config = cell.config.copy_and_resolve_references()
        config.seeds = attempt
        try:
            train(config, cell.folder, on_finish, root)
        except BusyError as error:
            # A process that trains the first of these seeds will train the others; one that took a later seed may not.
            if error.folder in {cell.folder / f"seed_{seed}" for seed in attempt[1:]}:
                attempts = [(seed,) for seed in attempt if not is_finished(cell, seed)]
            else:
                tell(f"{cell.title()}: left to another process")
        except Exception as error:  # of any kind: the other runs go on
            if isinstance(error, StoppedError) and error.by_disk:
                raise StoppedError(error.reason, "the same command resumes the sweep", root) from error
            if len(attempt) > 1:
                attempts = [(seed,) for seed in attempt if not is_finished(cell, seed)]
            else:
                told = None if isinstance(error, UserError | StoppedError) else own_error(error)
                failures[run_name(cell, attempt[0])] = told or " ".join(f"{type(error).__name__}: {error}".split())
        give_back_memory()
    return failures
