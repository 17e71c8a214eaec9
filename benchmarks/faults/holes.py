"""A random piece of metrics.jsonl is lost: 1 byte, 30 bytes, or all up to its end; then the run is resumed.

'right': it ended with the same bytes. 'told': a line says that figures before the older checkpoint have changed, or
that no checkpoint fits.
"""

import collections
import contextlib
import io
import shutil
from collections.abc import Iterator

from fedjax_ssl import train
from fedjax_ssl.errors import UserError
from fedjax_ssl.records.workdir import METRICS

from .common import Row, Trial, config_of, restore, row_of, same

MINUTES, COUNT = 6, 12
METHODS = ("fedanchor",)


def run(trial: Trial) -> Iterator[Row]:
    """Yields the part's rows."""
    for place, method in enumerate(METHODS):
        config, workdir = config_of(method, every=2), trial.folder / method
        train(config, workdir)
        lines = (workdir / METRICS).read_bytes()
        outcomes, refused = collections.Counter(), 0
        for turn in range(trial.share(place, len(METHODS))):
            if not trial.goes_on():
                break
            copy = trial.folder / f"{method}_{turn}"
            shutil.copytree(workdir, copy)
            start = trial.rng.randrange(len(lines))
            end = min(len(lines), start + trial.rng.choice([1, 30, len(lines)]))
            (copy / METRICS).write_bytes(lines[:start] + lines[end:])
            with contextlib.redirect_stderr(io.StringIO()) as said:
                try:
                    train(config, copy)
                    right = same(restore(copy, config).state, restore(workdir, config).state)
                    right &= "warning" in said.getvalue()
                    is_same = (copy / METRICS).read_bytes() == lines
                    outcomes["silent" if not right else "right" if is_same else "told"] += 1
                except UserError as error:
                    # Two checkpoints are kept; none can be used if the hole is before the older one.
                    outcomes["told" if "later than the records" in str(error) else "lost"] += 1
                    refused += 1
            shutil.rmtree(copy)
        yield row_of(f"a hole in metrics.jsonl, {method}", outcomes, f"{refused} refused")
