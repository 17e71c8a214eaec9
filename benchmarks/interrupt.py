"""Ends runs at every stage with SIGINT and SIGTERM, and says how long they took to go and whether they can be resumed.

    python benchmarks/interrupt.py --workdir=/tmp/interrupted

Each stage is begun in a process of its own, with an empty compilation cache. A run that was ended must go within five
seconds, or after the dispatch, without a crash, and leave no folder or one that is resumed to the bit of one that
nobody interrupted. What is printed is a table in Markdown.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SECONDS = 5.0
WORDS = ("--config.num_rounds=12", "--config.checkpoint_every=1", "--config.clients_per_round=3")
# Stage -> what begins it: a part of a line on stderr, a file in the run's folder, or seconds after the start.
STAGES = {
    "Python starts": 0.15,
    "importing": 0.8,
    "reading the data": "reading and dividing",
    "tracing": "tracing the rounds",
    "compiling": "compiling the",
    "pre-training": "workdir ",
    "checkpointing": "checkpoints/1",
    "rounds": "metrics.jsonl",
    "reporting": "summary.json",
}


def start(folder: pathlib.Path, cache: pathlib.Path, words=WORDS) -> subprocess.Popen:
    """Starts a run in a folder."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(ROOT / "launch.py"), f"--workdir={folder}", *words]
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log, stdout=log, start_new_session=True)


def wait_for(begins: float | str, process: subprocess.Popen, folder: pathlib.Path) -> bool:
    """Waits until a stage begins; whether the process still runs then."""
    log, started = folder.parent / f"{folder.name}.log", time.monotonic()
    while process.poll() is None:
        if isinstance(begins, float):
            if time.monotonic() - started > begins:
                return True
        elif (folder / begins).exists() or begins in log.read_text():
            return True
        time.sleep(0.002)
    return False


def results(folder: pathlib.Path) -> str:
    """What must be equal: the lines of the rounds."""
    return (folder / "metrics.jsonl").read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--kills", type=int, default=0, help="so many more, at random moments")
    options = parser.parse_args()
    parent = pathlib.Path(options.workdir)
    shutil.rmtree(parent, ignore_errors=True)
    parent.mkdir(parents=True)
    warm, reference = parent / "cache", parent / "reference"
    began = time.monotonic()
    assert start(reference, warm).wait() == 0, (parent / "reference.log").read_text()
    lasts = time.monotonic() - began
    cases = [(stage, STAGES[stage]) for stage in options.stages.split(",") if stage]
    cases += [("a random moment", random.uniform(0.1, lasts)) for _ in range(options.kills)]
    print("| stage | signal | ended after, s | status | folder | resumed |\n|---|---|---|---|---|---|")
    failed = 0
    for number, (stage, begins) in enumerate(cases):
        for signum in (signal.SIGINT, signal.SIGTERM):
            folder = parent / f"{number}-{signum.name}"
            cold = folder.parent / f"{folder.name}-cache"
            # Stages up to compiling find nothing in the cache, the later ones all.
            process = start(folder, cold if stage in list(STAGES)[:5] else warm)
            if not wait_for(begins, process, folder):
                print(f"| {stage} | {signum.name} | over before | {process.returncode} | | |")
                continue
            time.sleep(0.3 if isinstance(begins, str) else 0)
            sent = time.monotonic()
            process.send_signal(signum)
            status = process.wait()
            took = time.monotonic() - sent
            left = "none" if not folder.exists() else "config.json" if (folder / "config.json").exists() else "other"
            resumed = start(folder, warm).wait() == 0 and results(folder) == results(reference)
            wanted = {130, 143, -signal.SIGTERM, -signal.SIGINT} if stage == "Python starts" else {128 + signum}
            good = status in wanted and took < SECONDS and resumed
            failed += not good
            print(
                f"| {stage} | {signum.name} | {took:.2f} | {status} | {left} | {'equal' if resumed else 'NO'} |",
                flush=True,
            )
            shutil.rmtree(cold, ignore_errors=True)
    print(json.dumps({"failed": failed}))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
