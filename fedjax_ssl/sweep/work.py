"""Trains the cells of a sweep, one by one. Other processes may do the same; a run that fails does not end others."""

import pathlib
import time
from collections.abc import Callable, Mapping

import jax

from fedjax_ssl.errors import BusyError, StoppedError
from fedjax_ssl.run.memory import give_back_memory
from fedjax_ssl.run.observe.log import say
from fedjax_ssl.run.train import train
from fedjax_ssl.sweep.plan import Cell, is_finished

WAIT_SECONDS = 5.0  # between checks of a warm-up that another process trains


def finish(cells: list[Cell], root: pathlib.Path, on_finish: Callable[[], object], place: str) -> dict[str, str]:
    """Trains cells that others need, and waits for those that another process trains; returns the failures."""
    failures: dict[str, str] = {}
    for cell in cells:
        failures |= work_on(cell, cell.seeds, root, on_finish, place)
    for cell in cells:
        failures |= _wait_for(cell, root, on_finish, failures)
    return failures


def work_on(
    cell: Cell, seeds: tuple[int, ...], root: pathlib.Path, on_finish: Callable[[], object], place: str
) -> dict[str, str]:
    """Trains the unfinished seeds of a cell; returns the failures."""
    todo = tuple(seed for seed in seeds if not is_finished(cell, seed))
    if not todo:
        return {}
    say(f"{cell.title()} ({place}): seeds {', '.join(map(str, todo))}")
    failures = _run_cell(cell, todo, root, on_finish)
    jax.clear_caches()  # the next cell has other programs
    return failures


def run_name(cell: Cell, seed: int) -> str:
    """A run's name in the list of failures."""
    return f"{cell.title()}, seed {seed}"


def _wait_for(
    cell: Cell, root: pathlib.Path, on_finish: Callable[[], object], failures: Mapping[str, str]
) -> dict[str, str]:
    """Waits until a warm-up is finished or has failed; takes over runs that another process gives up."""
    failed = dict(failures)
    while True:
        todo = tuple(seed for seed in cell.seeds if not is_finished(cell, seed) and run_name(cell, seed) not in failed)
        if not todo:
            return {name: why for name, why in failed.items() if name not in failures}
        time.sleep(WAIT_SECONDS)
        failed |= work_on(cell, todo, root, on_finish, "warm-up")


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
            # The process that trains the first of these seeds will also train the others. A process that took a later
            # seed, while this one trained an earlier one, may train only that seed.
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
                failures[run_name(cell, attempt[0])] = " ".join(f"{type(error).__name__}: {error}".split())
        give_back_memory()
    return failures
