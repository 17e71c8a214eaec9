"""Seconds from the command to the first finished round, with an empty and with a filled compilation cache.

    python benchmarks/startup.py --out=startup.json
    python benchmarks/startup.py --model=cnn --repeats=1

Each measurement is a new process with `python launch.py --config=configs/fedanchor_cifar10.py:paper,MODEL` in a new
workdir: 100 clients of 100 images, 2 of them a round, one local epoch, one round. The server has 100 images and
pre-trains for one epoch: little, because that is not part of starting up, but it must be compiled. The images are
random and all are trained on (a threshold below all cosines), so all runs do the same work. 'cold' gets an empty folder
in XDG_CACHE_HOME, 'warm' the same folder again; --repeats=N makes N such pairs.

A round is finished when its line is in the workdir's metrics.jsonl, which is checked every 20 ms. 'compile' is tracing,
and compiling or loading both programs: compile_seconds of timings.jsonl. 'process' is the whole process, with the last
checkpoint and the summary. Prints `startup cold X`, `startup warm X` and `startup warm/cold X`, medians over the pairs.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from harness import describe, random_npz, write

ROOT = pathlib.Path(__file__).resolve().parent.parent
CLIENTS, IMAGES_EACH, ANCHORS = 100, 100, 100
FIELDS = {
    "num_clients": CLIENTS, "clients_per_round": 2, "num_rounds": 1, "client.epochs": 1, "data.source": "npz",
    "data.flip": "true", "data.server_labels": ANCHORS, "server.pretrain_epochs": 1,
    "data.examples_per_client": IMAGES_EACH, "confidence.threshold": -1.0,
}  # fmt: skip
LOOK_EVERY = 0.02  # seconds


def lines_of(path: pathlib.Path) -> list[dict]:
    """The finished lines of a .jsonl file that another process writes; none before it exists."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def measure(command: list[str], workdir: pathlib.Path, cache: pathlib.Path) -> dict[str, float]:
    """Runs a command to its end; returns the seconds of its parts.

    Raises:
        RuntimeError: it did not end well; the message has its output.
    """
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment["XDG_CACHE_HOME"] = str(cache)
    log, finished = workdir.with_suffix(".log"), None
    with log.open("w") as output:
        started = time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            if finished is None and lines_of(workdir / "metrics.jsonl"):
                finished = time.monotonic() - started
            time.sleep(LOOK_EVERY)
        ended = time.monotonic() - started
    if process.returncode or finished is None:
        raise RuntimeError(f"the run ended with status {process.returncode}:\n{log.read_text()}")
    local_steps = lines_of(workdir / "metrics.jsonl")[0]["local_steps"]
    assert local_steps == 2 * IMAGES_EACH // 10, f"the round had {local_steps} local steps: not every image qualified"
    compiling = next(line["compile_seconds"] for line in lines_of(workdir / "timings.jsonl"))
    megabytes = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file()) / 1e6
    return {"first round": finished, "compile": compiling, "process": ended, "cache, MB": megabytes}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wrn28_2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", default="startup.json")
    options, rows = parser.parse_args(), []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        fields = {**FIELDS, "data.path": random_npz(folder / "images.npz", CLIENTS * IMAGES_EACH + ANCHORS, 500)}
        command = [
            *(sys.executable, str(ROOT / "launch.py")),
            f"--config={ROOT / 'configs' / 'fedanchor_cifar10.py'}:paper,{options.model}",
            *(f"--config.{name}={value}" for name, value in fields.items()),
        ]
        for pair in range(options.repeats):
            for kind in ("cold", "warm"):
                workdir = folder / f"{kind}{pair}"
                found = measure([*command, f"--workdir={workdir}"], workdir, folder / f"cache{pair}")
                rows.append({"pair": pair, "cache": kind, **found})
                print(f"{kind} {found['first round']:.1f} s", file=sys.stderr, flush=True)
    cold, warm = ([row["first round"] for row in rows if row["cache"] == kind] for kind in ("cold", "warm"))
    print(f"startup cold {statistics.median(cold):.2f}")
    print(f"startup warm {statistics.median(warm):.2f}")
    print(f"startup warm/cold {statistics.median(w / c for w, c in zip(warm, cold)):.3f}")
    # The machine is described last: on a GPU this process would otherwise take memory from the measured processes.
    write(options.out, {**describe(), "model": options.model}, rows)


if __name__ == "__main__":
    main()
