"""A run gets SIGKILL at a random moment of its life, is started again, is killed again, ..., and is then left to end.

'right' says that metrics.jsonl has the same bytes in the end, and the last checkpoint the same numbers, as those of a
run that nobody killed. Half of the moments are after the folder was begun; runs that ended before their moment came
count as no try.
"""

import collections
import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator

from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.workdir import METRICS

from .common import Row, Trial, config_of, restore, row_of, same, start

MINUTES, COUNT = 25, 50
METHODS = ("fedanchor", "semifl", "fedil", "fixmatch", "sage", "supervised")


def run(trial: Trial) -> Iterator[Row]:
    """See above."""
    for place, method in enumerate(METHODS):
        if not trial.goes_on():
            break
        number = trial.share(place, len(METHODS))
        start(method, trial.folder / f"{method}_first").communicate()  # fills the cache of compiled programs
        began = time.monotonic()
        process = start(method, trial.folder / method)
        _, errors = process.communicate()
        seconds = time.monotonic() - began
        assert process.returncode == 0, errors
        moments, over, tracebacks = collections.Counter(), 0, 0
        workdir = trial.folder / f"{method}_killed"
        while moments.total() < number and trial.goes_on():
            began = time.monotonic()
            process = start(method, workdir)
            # Most of a short run's life is importing and compiling: half of the moments are after the folder is begun.
            if trial.rng.random() < 0.5:
                while process.poll() is None and not (workdir / ".lock").exists():
                    time.sleep(0.01)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(trial.rng.uniform(0, seconds))
            is_over = process.poll() is not None
            process.send_signal(signal.SIGKILL)
            _, errors = process.communicate()
            tracebacks += "Traceback" in errors
            if is_over:  # from the beginning again, with earlier moments
                assert process.returncode == 0, errors
                over, seconds = over + 1, min(seconds, time.monotonic() - began)
                shutil.rmtree(workdir)
                continue
            done = Checkpoints(workdir / "checkpoints").latest_round()
            kind = "before the folder" if not (workdir / "config.json").exists() else "before a checkpoint"
            moments[kind if done is None else "in the rounds"] += 1
        process = start(method, workdir)
        _, errors = process.communicate()
        config = config_of(method, every=1)
        is_same = (
            process.returncode == 0
            and (workdir / METRICS).read_bytes() == (trial.folder / method / METRICS).read_bytes()
            and same(restore(workdir, config).state, restore(trial.folder / method, config).state)
        )
        outcomes = collections.Counter({"right" if is_same else "lost": moments.total() - tracebacks})
        outcomes["tracebacks"] = tracebacks
        note = ", ".join(f"{count} {moment}" for moment, count in sorted(moments.items())) + f"; over {over}"
        yield row_of(f"SIGKILL, {method}", outcomes, note)
