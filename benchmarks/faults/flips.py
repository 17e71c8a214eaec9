"""One flipped bit in the newest checkpoint, drawn uniformly over all bits of its files.

'told': the damage was named and the checkpoint before was used, with every number as it was saved. The note counts what
Orbax alone makes of the same damage: it reads wrong numbers without an error.
"""

import collections
from collections.abc import Iterator

import numpy as np
import orbax.checkpoint as ocp

from fedjax_ssl import train
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.run.experiment import build_experiment

from .common import ROUNDS, Row, Trial, config_of, row_of, same

MINUTES, COUNT = 8, 200
METHODS = ("fedanchor", "semifl", "fedil")


def run(trial: Trial) -> Iterator[Row]:
    """Yields the part's rows."""
    for place, method in enumerate(METHODS):
        config, workdir = config_of(method, every=2), trial.folder / method
        train(config, workdir)
        newest, like = workdir / "checkpoints" / str(ROUNDS), build_experiment(config).state_shape
        whole = Checkpoints(workdir / "checkpoints").restore(like)
        before = Checkpoints(workdir / "checkpoints").restore(like, reached=ROUNDS - 1)
        saved = _by_orbax(newest / "state")
        files = sorted(path for path in newest.rglob("*") if path.is_file())
        sizes = [path.stat().st_size for path in files]
        outcomes, silent_alone = collections.Counter(), 0
        for _ in range(trial.share(place, len(METHODS))):
            if not trial.goes_on():
                break
            (file,) = trial.rng.choices(files, sizes)
            original = file.read_bytes()
            content = bytearray(original)
            content[trial.rng.randrange(len(content))] ^= 1 << trial.rng.randrange(8)
            file.write_bytes(content)
            found = Checkpoints(workdir / "checkpoints").restore(like)
            noticed = len(found.passed_over) == 1 and "damaged" in found.passed_over[0]
            is_right = found.round == before.round == ROUNDS - 2 and same(found.state, before.state)
            outcomes["told" if noticed and is_right else "silent"] += 1
            alone = _by_orbax(newest / "state")
            silent_alone += alone is not None and not same(alone, saved)
            file.write_bytes(original)
        assert same(Checkpoints(workdir / "checkpoints").restore(like).state, whole.state)
        note = f"{sum(sizes):,} bytes; without checksums {silent_alone} silent"
        yield row_of(f"a bit of a checkpoint, {method}", outcomes, note)


def _by_orbax(folder):
    """A checkpoint's content, read by Orbax alone; None if Orbax reports an error."""
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            tree = checkpointer.metadata(folder).item_metadata.tree
            kinds = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in tree}
            found = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(restore_args=kinds))
            return dict(sorted(found.items()))
    except Exception:
        return None
