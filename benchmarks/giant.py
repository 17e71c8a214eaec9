"""Federations larger than memory: resident memory, and times of a round, the start and the report.

    python benchmarks/giant.py --folder=/tmp/giant --json=giant.json
    python benchmarks/giant.py --folder=/tmp/giant --only=heavy,million

Each row is a new process with `launch.py train`: FixMatch, FedU or FedMatch with the small CNN and 10 clients a round,
on random images that it writes to the folder:

heavy       59,991 clients: one of 600,000 images of 8x8, the others of 10
thousand    1,000 clients of one image
million     1,000,000 clients of one image
zipf        1,000,000 clients, sizes by a Zipf law, at most 2,000
overflow    342,477 clients as in StackOverflow, 2 images each
flair       51,414 clients and 345,879 images of 64x64x3, 4.2 GB, with a heavy tail, as in FLAIR; the process may have
            2.5 GB of memory of its own (RLIMIT_DATA)
flair_device   the same with all images on the device, without the limit
fedu_disk   FedU, 100,000 clients, each with its own model in clients.sqlite; also the size of the file
fedu_host   the same on the host
fedmatch_disk  FedMatch, 100,000 clients, for each of which the server remembers two models in clients.sqlite

'start' is the time until the first round begins, without compiling; 'report' is from the last round to the end.
"""

import argparse
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import time
from typing import NamedTuple

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
SERVER, TEST = 500, 200


class Case(NamedTuple):
    """A row of the table."""

    sizes: np.ndarray  # of the clients
    side: int = 8
    channels: int = 1
    method: str = "fixmatch"
    fields: tuple[str, ...] = ()
    limit: int | None = None  # bytes of the process's own memory


def cases() -> dict[str, Case]:
    """All rows by name."""
    rng = np.random.default_rng(0)
    heavy = np.full(59_991, 10)
    heavy[7] = 600_000
    flair = np.maximum(1, (345_879 * (share := rng.pareto(1.3, 51_414) + 0.05) / share.sum()).astype(int))
    flair[np.argmax(flair)] += 345_879 - flair.sum()
    small = ("model.projector_hidden=128", "model.projector_dim=64")
    helpers = ("model.normalisation=running", "fedmatch.helper_interval=1")
    on_host = ("residence.data=host",)
    return {
        "heavy": Case(heavy),
        "thousand": Case(np.ones(1_000, int)),
        "million": Case(np.ones(1_000_000, int)),
        "zipf": Case(np.minimum(rng.zipf(1.8, 1_000_000), 2_000)),
        "overflow": Case(np.full(342_477, 2)),
        "flair": Case(flair, 64, 3, fields=on_host, limit=int(2.5e9)),
        "flair_device": Case(flair, 64, 3, fields=("residence.data=device",)),
        "fedu_disk": Case(np.full(100_000, 2), 8, 1, "fedu", ("residence.clients=disk", *small)),
        "fedu_host": Case(np.full(100_000, 2), 8, 1, "fedu", ("residence.clients=host", *small)),
        "fedmatch_disk": Case(np.full(100_000, 2), 8, 1, "fedmatch", ("residence.clients=disk", *helpers)),
    }


def make(case: Case, folder: pathlib.Path) -> None:
    """Writes data.npz and partition.npz in blocks of images, which needs little memory."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "partition.npz").exists():
        return
    rng, total = np.random.default_rng(1), int(case.sizes.sum()) + SERVER
    images = np.lib.format.open_memmap(
        folder / "x_train.npy", "w+", np.uint8, (total, case.side, case.side, case.channels)
    )
    for first in range(0, total, 50_000):
        images[first : first + 50_000] = rng.integers(0, 256, images[first : first + 50_000].shape, np.uint8)
    test = rng.integers(0, 256, (TEST, *images.shape[1:]), np.uint8)
    labels = rng.integers(0, 10, total)
    np.savez(folder / "data.npz", x_train=images, y_train=labels, x_test=test, y_test=np.arange(TEST) % 10)
    (folder / "x_train.npy").unlink()
    rows = rng.permutation(total).astype(np.int32)
    np.savez(folder / "partition.npz", server_index=rows[:SERVER], client_size=case.sizes, client_index=rows[SERVER:])


def measure(name: str, case: Case, folder: pathlib.Path, rounds: int) -> dict[str, object]:
    """Trains a row; returns its figures."""
    make(case, folder)
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    fields = {
        "data.source": "npz",
        "data.path": folder / "data.npz",
        "data.partition_file": folder / "partition.npz",
        "data.examples_per_client": 0,
        "data.server_labels": SERVER,
        "num_clients": len(case.sizes),
        "clients_per_round": 10,
        "num_rounds": rounds,
        "rounds_per_dispatch": 1,
        "client.epochs": 1,
        "server.pretrain_epochs": 1,
        "devices": 1,
    }
    words = [f"--config.{field}={value}" for field, value in fields.items()]
    words += [f"--config.{field}" for field in case.fields]
    command = [sys.executable, "launch.py", "train", f"--config=configs/quickstart.py:{case.method}"]

    def limit() -> None:
        if case.limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (case.limit, case.limit))

    before = time.time()
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [*command, f"--workdir={run}", *words], cwd=ROOT, stdout=log, stderr=log, preexec_fn=limit
        )
        usage = _wait(process)
    seconds = time.time() - before
    if process.returncode:
        return {"row": name, "failed": (folder / "log.txt").read_text().strip().splitlines()[-1]}
    timings = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
    of_rounds = [line["seconds"] for line in timings if "seconds" in line]
    compiling = sum(line.get("compile_seconds", 0) for line in timings)
    report = (run / "report.html").stat().st_mtime - (run / "metrics.jsonl").stat().st_mtime
    file = run / "clients.sqlite"
    return {
        "row": name,
        "clients": len(case.sizes),
        "resident_gb": round(usage / 1e9, 2),
        "seconds_a_round": float(np.median(of_rounds[1:])),
        "compiling": round(compiling, 1),
        "start": round(seconds - compiling - sum(of_rounds) - report, 1),
        "report": round(report, 1),
        "file_mb": round(file.stat().st_size / 1e6, 1) if file.exists() else None,
    }


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Waits for a process; returns its peak resident memory in bytes."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss * 1024


def main() -> None:
    """Makes the data, trains, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--only", default=",".join(cases()))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    found = []
    for name in options.only.split(","):
        found.append(measure(name, cases()[name], options.folder / name.removesuffix("_device"), options.rounds))
        print(json.dumps(found[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
