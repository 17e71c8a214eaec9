"""A run gets SIGKILL at random moments, is started again each time, and finally left to end.

'right': metrics.jsonl has the same bytes in the end, and the last checkpoint the same numbers, as in an undisturbed
run. Half of the moments are after the folder was begun. Runs that end before their moment do not count.
"""

import collections
import contextlib
import pathlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.workdir import METRICS

from .common import Row, Trial, config_of, restore, row_of, same, start

MINUTES, COUNT = 25, 50
METHODS = ("fedanchor", "semifl", "fedil", "fixmatch", "sage", "supervised")


def run(trial: Trial) -> Iterator[Row]:
    """Yields the part's rows."""

    def same_state(method: str, workdir: pathlib.Path, whole: pathlib.Path) -> bool:
        config = config_of(method, every=1)
        return same(restore(workdir, config).state, restore(whole, config).state)

    for place, method in enumerate(METHODS):
        if not trial.goes_on():
            break
        yield kill(trial, method, {}, trial.share(place, len(METHODS)), ".lock", 0.5, same_state)


def kill(
    trial: Trial,
    method: str,
    fields: Mapping[str, Any],
    number: int,
    begun: str,
    share: float,
    same_state: Callable[[str, pathlib.Path, pathlib.Path], bool],
) -> Row:
    """Kills a method's run repeatedly, and finally lets it end.

    Args:
        trial: of the part.
        method: of the run.
        fields: of its configuration.
        number: of kills.
        begun: a file of the workdir.
        share: share of the moments that are after this file exists.
        same_state: whether a method's states in two workdirs are equal.
    """
    start(method, trial.folder / f"{method}_first", **fields).communicate()  # fills the cache of compiled programs
    began = time.monotonic()
    process = start(method, trial.folder / method, **fields)
    while process.poll() is None and not (trial.folder / method / begun).exists():
        time.sleep(0.01)
    seconds_before = time.monotonic() - began
    _, errors = process.communicate()
    seconds = time.monotonic() - began
    assert process.returncode == 0, errors
    moments, over, tracebacks = collections.Counter(), 0, 0
    workdir = trial.folder / f"{method}_killed"
    while moments.total() < number and trial.goes_on():
        began, longest, is_begun = time.monotonic(), seconds, (workdir / begun).exists()
        process = start(method, workdir, **fields)
        # Most of a short run's time is importing and compiling.
        if trial.rng.random() < share:
            longest = seconds if share < 1 else seconds - seconds_before
            while process.poll() is None and not (workdir / begun).exists():
                time.sleep(0.01)
            if share == 1 and is_begun:  # the file is from an earlier start: wait as long as the first start took
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds_before)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(trial.rng.uniform(0, longest))
        is_over = process.poll() is not None
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        tracebacks += "Traceback" in errors
        if is_over:  # start again from the beginning, with earlier moments
            assert process.returncode == 0, errors
            over, seconds = over + 1, min(seconds, time.monotonic() - began)
            shutil.rmtree(workdir)
            continue
        done = Checkpoints(workdir / "checkpoints").rounds()
        kind = "before the folder" if not (workdir / "config.json").exists() else "before a checkpoint"
        moments["in the rounds" if done else kind] += 1
    process = start(method, workdir, **fields)
    _, errors = process.communicate()
    is_same = (
        process.returncode == 0
        and (workdir / METRICS).read_bytes() == (trial.folder / method / METRICS).read_bytes()
        and same_state(method, workdir, trial.folder / method)
    )
    outcomes = collections.Counter({"right" if is_same else "lost": moments.total() - tracebacks})
    outcomes["tracebacks"] = tracebacks
    note = ", ".join(f"{count} {moment}" for moment, count in sorted(moments.items())) + f"; over {over}"
    return row_of(f"SIGKILL, {method}", outcomes, note)
