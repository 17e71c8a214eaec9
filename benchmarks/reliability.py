"""Attacks on runs at scale; docs/reliability.md has the figures, tests/test_damaged_runs.py each fault once.

    python benchmarks/reliability.py flips --out=flips.json
    python benchmarks/reliability.py kills --out=kills.json
    python benchmarks/reliability.py holes --out=holes.json

flips: trains a short run of each of --methods. Then, --count times in all, one bit of the newest checkpoint, drawn
uniformly over all bits of all its files, is changed, and the checkpoints are read again. 'noticed' says that the
damage was named and the checkpoint before it was taken, with every number as it was saved; 'silent' that the damaged
one was taken, or anything else came back. 'silent without checksums' is what Orbax alone makes of the same damage: it
reads numbers that are not those that were saved, without an error.

kills: trains a run of each of --methods in a process of its own without interruption, then another that gets SIGKILL
at a random moment of its life, is started again, is killed again, ..., --count times in all, and is then left to end.
metrics.jsonl must have the same bytes, and the last checkpoint the same numbers.

holes: like flips, but metrics.jsonl loses a random piece; the run is started again, and must end with the same bytes
or say in a line that the figures before the older checkpoint have changed, or that no checkpoint fits.
"""

import argparse
import contextlib
import io
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
from harness import describe, write

from fedjax_ssl import base_config, train
from fedjax_ssl.config import apply_arguments
from fedjax_ssl.errors import UserError
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.workdir import METRICS
from fedjax_ssl.run.experiment import build_experiment

LAUNCH = pathlib.Path(__file__).resolve().parent.parent / "launch.py"
ROUNDS = 6
FIELDS = {
    "num_rounds": ROUNDS, "num_clients": 8, "clients_per_round": 4, "data.source": "digits", "data.num_anchors": 40,
    "data.examples_per_client": 33, "model.name": "cnn", "augment.padding": 1, "augment.flavour": "none",
    "server.augmentation": "weak", "client.epochs": 1, "server.pretrain_epochs": 1, "log.report": False,
    "log.tensorboard": False,
}  # fmt: skip


def config_of(method: str, every: int):
    """A run of some seconds."""
    config = apply_arguments(base_config(), method)
    config.update_from_flattened_dict({**FIELDS, "checkpoint_every": every})
    return config


def restore(workdir: pathlib.Path, config):
    """The newest checkpoint that is whole."""
    return Checkpoints(workdir / "checkpoints").restore(build_experiment(config).state_shape)


def same(one, other) -> bool:
    """Whether two trees have the same numbers, to the bit; NaN is NaN."""
    leaves, others = jax.tree.leaves(one), jax.tree.leaves(other)
    return len(leaves) == len(others) and all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(leaves, others)
    )


def by_orbax(folder: pathlib.Path):
    """All that is in a checkpoint, by Orbax alone; None if it says that something is wrong."""
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            tree = checkpointer.metadata(folder).item_metadata.tree
            kinds = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in tree}
            found = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(restore_args=kinds))
            return dict(sorted(found.items()))
    except Exception:
        return None


def flips(methods: list[str], count: int, folder: pathlib.Path, rng: random.Random) -> list[dict]:
    """See above."""
    rows = []
    for place, method in enumerate(methods):
        number = count // len(methods) + (place < count % len(methods))
        config, workdir = config_of(method, every=2), folder / method
        train(config, workdir)
        newest, like = workdir / "checkpoints" / str(ROUNDS), build_experiment(config).state_shape
        whole = Checkpoints(workdir / "checkpoints").restore(like)
        before = Checkpoints(workdir / "checkpoints").restore(like, reached=ROUNDS - 1)
        saved = by_orbax(newest / "state")
        files = sorted(path for path in newest.rglob("*") if path.is_file())
        sizes = [path.stat().st_size for path in files]
        counts = {"flips": number, "noticed": 0, "silent": 0, "silent without checksums": 0}
        for _ in range(number):
            (file,) = rng.choices(files, sizes)
            content = bytearray(file.read_bytes())
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            original = file.read_bytes()
            file.write_bytes(content)
            found = Checkpoints(workdir / "checkpoints").restore(like)
            noticed = len(found.passed_over) == 1 and "damaged" in found.passed_over[0]
            is_right = found.round == before.round == ROUNDS - 2 and same(found.state, before.state)
            counts["noticed" if noticed and is_right else "silent"] += 1
            alone = by_orbax(newest / "state")
            counts["silent without checksums"] += alone is not None and not same(alone, saved)
            file.write_bytes(original)
        assert same(Checkpoints(workdir / "checkpoints").restore(like).state, whole.state)
        rows.append({"method": method, "bytes": sum(sizes), **counts})
    return rows


def holes(methods: list[str], count: int, folder: pathlib.Path, rng: random.Random) -> list[dict]:
    """See above."""
    rows = []
    for place, method in enumerate(methods):
        number = count // len(methods) + (place < count % len(methods))
        config, workdir = config_of(method, every=2), folder / method
        train(config, workdir)
        lines = (workdir / METRICS).read_bytes()
        counts = {"holes": number, "the same bytes": 0, "said in a line": 0, "refused in a line": 0, "other": 0}
        for turn in range(number):
            copy = folder / f"{method}_{turn}"
            shutil.copytree(workdir, copy)
            start = rng.randrange(len(lines))
            end = min(len(lines), start + rng.choice([1, 30, len(lines)]))
            (copy / METRICS).write_bytes(lines[:start] + lines[end:])
            with contextlib.redirect_stderr(io.StringIO()) as said:
                try:
                    train(config, copy)
                    right = same(restore(copy, config).state, restore(workdir, config).state)
                    right &= "warning" in said.getvalue()
                    is_same = (copy / METRICS).read_bytes() == lines
                    counts["other" if not right else "the same bytes" if is_same else "said in a line"] += 1
                except UserError as error:
                    # Two checkpoints are kept, so nothing can be taken if the hole is before the older one.
                    counts["refused in a line" if "later than the records" in str(error) else "other"] += 1
            shutil.rmtree(copy)
        rows.append({"method": method, **counts})
    return rows


def start(method: str, workdir: pathlib.Path) -> subprocess.Popen:
    """The same run by the command line."""
    fields = [f"--config.{name}={str(value).lower()}" for name, value in {**FIELDS, "checkpoint_every": 1}.items()]
    command = [sys.executable, str(LAUNCH), f"--config={LAUNCH.parent}/configs/quickstart.py:{method}", *fields]
    return subprocess.Popen([*command, f"--workdir={workdir}"], stderr=subprocess.PIPE, text=True)


def kills(methods: list[str], count: int, folder: pathlib.Path, rng: random.Random) -> list[dict]:
    """See above."""
    rows = []
    for place, method in enumerate(methods):
        number = count // len(methods) + (place < count % len(methods))
        start(method, folder / f"{method}_first").communicate()  # fills the cache of compiled programs
        began = time.monotonic()
        process = start(method, folder / method)
        _, errors = process.communicate()
        seconds = time.monotonic() - began
        assert process.returncode == 0, errors
        moments = {"before the folder": 0, "before a checkpoint": 0, "in the rounds": 0, "over": 0}
        workdir = folder / f"{method}_killed"
        while sum(moments.values()) - moments["over"] < number:
            began = time.monotonic()
            process = start(method, workdir)
            # Most of a short run's life is importing and compiling: half of the moments are after the folder is begun.
            if rng.random() < 0.5:
                while process.poll() is None and not (workdir / ".lock").exists():
                    time.sleep(0.01)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0, seconds))
            over = process.poll() is not None
            process.send_signal(signal.SIGKILL)
            _, errors = process.communicate()
            assert not over or process.returncode == 0, errors
            done = Checkpoints(workdir / "checkpoints").latest_round()
            kind = "before the folder" if not (workdir / "config.json").exists() else "before a checkpoint"
            moments["over" if over else kind if done is None else "in the rounds"] += 1
            if over:  # it counts as no kill: from the beginning again, with earlier moments
                seconds = min(seconds, time.monotonic() - began)
                shutil.rmtree(workdir)
        process = start(method, workdir)
        _, errors = process.communicate()
        config = config_of(method, every=1)
        is_same = (
            process.returncode == 0 and (workdir / METRICS).read_bytes() == (folder / method / METRICS).read_bytes()
        )
        is_same = is_same and same(restore(workdir, config).state, restore(folder / method, config).state)
        rows.append({"method": method, "kills": number, **moments, "to the bit": is_same})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Reads the arguments, runs one attack, and writes what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    attacks = {"flips": (flips, 200, 3), "holes": (holes, 30, 1), "kills": (kills, 50, 6)}
    parser.add_argument("attack", choices=attacks)
    parser.add_argument("--methods", default="fedanchor,semifl,fedil,fixmatch,sage,supervised")
    parser.add_argument("--count", type=int, help="in all; by default 200 flips, 30 holes or 50 kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="reliability.json")
    options = parser.parse_args()
    attack, count, number = attacks[options.attack]
    with tempfile.TemporaryDirectory() as folder:
        rows = attack(
            options.methods.split(",")[:number],
            options.count or count,
            pathlib.Path(folder),
            random.Random(options.seed),
        )
    write(options.out, {**describe(), "orbax": ocp.__version__, "cores used": len(os.sched_getaffinity(0))}, rows)


if __name__ == "__main__":
    main()
