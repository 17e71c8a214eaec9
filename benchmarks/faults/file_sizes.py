"""A limit on a run's file sizes (RLIMIT_FSIZE), from some bytes to some hundred thousand.

'told': one line reports it, with status 2 before the run began or 4 after, and the run, resumed without a limit, ends
with the records and the last checkpoint of an undisturbed run. 'right': it ended in spite of the limit. Three of the
runs start with an empty cache of compiled programs, which is then limited, too.
"""

import collections
import resource
import shutil
from collections.abc import Iterator

from fedjax_ssl.records.workdir import METRICS, SUMMARY

from .common import Row, Trial, config_of, restore, row_of, same, start

MINUTES, COUNT = 15, 11
SIZES = (150_000, 60_000, 30_000, 10_000, 3_000, 1_000, 100, 0)
COLD = (150_000, 30_000, 1_000)
METHOD = "fedanchor"


def run(trial: Trial) -> Iterator[Row]:
    """Yields the part's rows."""
    whole = trial.folder / "whole"
    process = start(METHOD, whole)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    state = restore(whole, config_of(METHOD, every=1)).state
    outcomes, notes = collections.defaultdict(collections.Counter), collections.defaultdict(collections.Counter)
    for turn in range(trial.count):
        if not trial.goes_on():
            break
        size, is_cold = ([(size, False) for size in SIZES] + [(size, True) for size in COLD])[turn % 11]
        workdir, cache = trial.folder / f"try_{turn}", trial.folder / f"cache_{turn}"
        process = start(
            METHOD,
            workdir,
            options={"env": {"XDG_CACHE_HOME": str(cache)} if is_cold else {}},
        )
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, size))  # long before it writes anything
        _, errors = process.communicate()
        lines = [line for line in errors.splitlines() if line.startswith(("error: ", "stopped: "))]
        status = process.returncode
        if "Traceback" in errors or status not in (0, 2, 4) or len(lines) != (status != 0):
            print(size, status, errors)
            outcome = "tracebacks"
        else:
            left = (workdir / METRICS).exists()
            notes[size][f"status {status}, {'rounds' if left else 'no folder'}"] += 1
            resumed = start(METHOD, workdir)
            _, more = resumed.communicate()
            is_same = (
                resumed.returncode == 0
                and (workdir / SUMMARY).exists()
                and (workdir / METRICS).read_bytes() == (whole / METRICS).read_bytes()
                and same(restore(workdir, config_of(METHOD, every=1)).state, state)
            )
            if not is_same:
                print(size, status, errors, more, sep="\n")
            outcome = "lost" if not is_same else "told" if status else "right"
        outcomes[size][outcome] += 1
        shutil.rmtree(workdir, ignore_errors=True)
        shutil.rmtree(cache, ignore_errors=True)
    for size, counts in outcomes.items():
        note = "; ".join(f"{count}x {what}" for what, count in sorted(notes[size].items()))
        yield row_of(f"no file above {size:,} bytes", counts, note)
