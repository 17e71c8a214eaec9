"""A sweep gets SIGKILL and is started again; or two sweeps share one folder, and one is killed.

'right': the restarted sweep ended with the table of an undisturbed sweep (except for columns of seconds), and each run
with the same bytes of metrics.jsonl and the same numbers in the last checkpoint. Of two processes, the remaining one
must first end with status 0. The moments are spread evenly over the time of an undisturbed sweep.
"""

import collections
import contextlib
import csv
import functools
import pathlib
import shutil
import subprocess
import time
from collections.abc import Iterator

from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.workdir import CHECKPOINTS, CONFIG, METRICS
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.run.resuming import saved_config

from .common import FIELDS, ROOT, Row, Trial, launch, row_of, same

MINUTES, COUNT = 25, 15
TABLES = ("table.csv", "table_runs.csv")
FILE = """
from fedjax_ssl.sweep import Sweep

def get_sweep():
    return Sweep(
        config={config!r},
        methods={{"Centralised": "centralised", "Labels alone": "supervised"}},
        seeds=(0, 1),
        common={common!r},
        target_accuracy=0.3,
    )
"""


def run(trial: Trial) -> Iterator[Row]:
    """Yields the part's rows."""
    file = trial.folder / "sweep.py"
    file.write_text(FILE.format(config=f"{ROOT}/configs/quickstart.py", common={**FIELDS, "checkpoint_every": 2}))

    def start(workdir: pathlib.Path) -> subprocess.Popen:
        return launch("sweep", str(file), f"--workdir={workdir}")

    start(trial.folder / "first").communicate()  # fills the cache of compiled programs
    began, whole = time.monotonic(), trial.folder / "whole"
    process = start(whole)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    seconds = time.monotonic() - began
    # Every third try has two processes. Moments are spread evenly, in random order.
    shares = [(turn + 1) / (trial.count + 1) for turn in range(trial.count)]
    trial.rng.shuffle(shares)
    outcomes = collections.Counter(), collections.Counter()
    over = again = 0
    for turn, share in enumerate(shares):
        if not trial.goes_on():
            break
        workdir, is_pair = trial.folder / f"try_{turn}", turn % 3 == 2
        processes = [start(workdir) for _ in range(2 if is_pair else 1)]
        is_over, said = _kill(processes.pop(0), share * seconds * (1.5 if is_pair else 1.0))
        over += is_over
        for process in processes:
            said += process.communicate()[1] + f"Traceback: status {process.returncode}" * (process.returncode != 0)
            # The killed process's run, which the other process left out, remains for the next process.
            again += not _equal(workdir, whole)
        outcomes[is_pair][_outcome(start(workdir), said, workdir, whole)] += 1
        shutil.rmtree(workdir)
    yield row_of("SIGKILL of a sweep", outcomes[0], f"over before: {over}, of both kinds")
    yield row_of("two sweeps on a folder, SIGKILL of one", outcomes[1], f"{again} left a run for the next start")


def _kill(process: subprocess.Popen, seconds: float) -> tuple[bool, str]:
    """Kills a process after so many seconds; returns whether it had ended before, and its output."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    is_over = process.poll() is not None
    process.kill()
    return is_over, process.communicate()[1]


def _outcome(process: subprocess.Popen, before: str, workdir: pathlib.Path, whole: pathlib.Path) -> str:
    """The outcome of the process started last."""
    _, errors = process.communicate()
    if "Traceback" in before + errors or process.returncode not in (0, 4):
        print(before, errors)
        return "tracebacks"
    return "right" if process.returncode == 0 and _equal(workdir, whole) else "lost"


def _equal(workdir: pathlib.Path, whole: pathlib.Path) -> bool:
    """Whether two sweeps have the same tables, records and last checkpoints."""
    runs = sorted(path.parent.relative_to(whole) for path in whole.rglob(CONFIG))
    if runs != sorted(path.parent.relative_to(workdir) for path in workdir.rglob(CONFIG)):
        return False
    return all(_rows(workdir / name) == _rows(whole / name) for name in TABLES) and all(
        (workdir / run / METRICS).read_bytes() == (whole / run / METRICS).read_bytes()
        and same(*(Checkpoints(folder / run / CHECKPOINTS).restore(_like(whole / run)) for folder in (workdir, whole)))
        for run in runs
    )


def _rows(table: pathlib.Path) -> list[dict[str, str]]:
    """A table's rows without times."""
    with table.open() as file:
        return [{name: value for name, value in row.items() if "seconds" not in name} for row in csv.DictReader(file)]


@functools.cache
def _like(run: pathlib.Path):
    """The shapes of a run's state."""
    return build_experiment(saved_config(str(run), allow_code=False)).state_shape
