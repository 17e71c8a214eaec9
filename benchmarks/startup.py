"""Seconds from the command to the first finished round, with an empty and with a filled compilation cache.

    python benchmarks/startup.py --out=startup.json
    python benchmarks/startup.py --model=cnn --repeats=1

Each measurement is a new process with `python launch.py --config=configs/fedanchor_cifar10.py:paper,MODEL` in a new
workdir: 100 clients of 100 images, 2 of them a round, one local epoch, one round. The server has --anchors images and
pre-trains for --pretrain_epochs epochs: few, because that is not part of starting up, but not none, because it must be
compiled. The images are random and all are trained on (a threshold below all cosines), so both runs do the same work.
The rest is as in the config. 'cold' gets an empty folder in XDG_CACHE_HOME, 'warm' the same folder again; --repeats=N
makes N such pairs. The operating system's file cache is warm in both, except perhaps for the first run.

A round is finished when its line is in the workdir's metrics.jsonl, which is checked every 20 ms. The parts:

    begin      interpreter, imports, data, partition, shapes: everything before the next part
    compile    tracing, and compiling or loading both programs: compile_seconds of timings.jsonl
    init       until the first round: initialisation, pre-training, the first checkpoint
    round      seconds of round 1 in timings.jsonl

'process' is the whole process, with the last checkpoint and the summary.

Prints `startup cold X`, `startup warm X` and `startup warm/cold X`, medians over the pairs.
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
CLIENTS, IMAGES_EACH = 100, 100
LOOK_EVERY = 0.02  # seconds


def command_of(options: argparse.Namespace, images: pathlib.Path, workdir: pathlib.Path) -> list[str]:
    """The command line to be measured."""
    overrides = {
        "num_clients": CLIENTS,
        "clients_per_round": 2,
        "num_rounds": 1,
        "client.epochs": 1,
        "data.source": "npz",
        "data.path": images,
        "data.flip": "true",
        "data.server_labels": options.anchors,
        "server.pretrain_epochs": options.pretrain_epochs,
        "data.examples_per_client": IMAGES_EACH,
        "confidence.threshold": -1.0,
    }
    return [
        sys.executable,
        str(ROOT / "launch.py"),
        f"--config={ROOT / 'configs' / 'fedanchor_cifar10.py'}:paper,{options.model}",
        f"--workdir={workdir}",
        *(f"--config.{name}={value}" for name, value in overrides.items()),
    ]


def lines_of(path: pathlib.Path) -> list[dict]:
    """The finished lines of a .jsonl file that another process writes; none before it exists."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def measure(command: list[str], workdir: pathlib.Path, cache: pathlib.Path) -> dict[str, float]:
    """Runs a command to its end; returns seconds to the first round, and their parts.

    Raises:
        RuntimeError: the run ended without a finished round; the message has its output.
    """
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment["XDG_CACHE_HOME"] = str(cache)
    log = workdir.with_suffix(".log")
    compiled = finished = None
    with log.open("w") as output:
        started = time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            while finished is None:
                ended = process.poll() is not None  # checked first: a run's last line comes before its end
                now = time.monotonic() - started
                if compiled is None and lines_of(workdir / "timings.jsonl"):
                    compiled = now
                if lines_of(workdir / "metrics.jsonl"):
                    finished = now
                elif ended:
                    raise RuntimeError(f"no round was finished:\n{log.read_text()}")
                else:
                    time.sleep(LOOK_EVERY)
            if process.wait() != 0:
                raise RuntimeError(f"the run ended with status {process.returncode}:\n{log.read_text()}")
            ended = time.monotonic() - started
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    timings = lines_of(workdir / "timings.jsonl")
    compile_seconds = next(line["compile_seconds"] for line in timings if "compile_seconds" in line)
    round_seconds = next(line["seconds"] for line in timings if "seconds" in line)
    local_steps = lines_of(workdir / "metrics.jsonl")[0]["local_steps"]
    assert local_steps == 2 * IMAGES_EACH // 10, f"the round had {local_steps} local steps: not every image qualified"
    return {
        "first round": finished,
        "begin": compiled - compile_seconds,
        "compile": compile_seconds,
        "init": finished - compiled - round_seconds,
        "round": round_seconds,
        "process": ended,
        "cache, MB": sum(file.stat().st_size for file in cache.rglob("*") if file.is_file()) / 1e6,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wrn28_2")
    parser.add_argument("--anchors", type=int, default=100)
    parser.add_argument("--pretrain_epochs", type=int, default=1)
    parser.add_argument("--test_images", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", default="startup.json")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        random_npz(folder / "images.npz", CLIENTS * IMAGES_EACH + options.anchors, options.test_images)
        for pair in range(options.repeats):
            cache = folder / f"cache{pair}"
            for kind in ("cold", "warm"):
                workdir = folder / f"{kind}{pair}"
                command = command_of(options, folder / "images.npz", workdir)
                rows.append({"pair": pair, "cache": kind, **measure(command, workdir, cache)})
                print(f"{kind} {rows[-1]['first round']:.1f} s", file=sys.stderr, flush=True)
    # The machine is described last: on a GPU this process would otherwise take memory from the measured processes.
    machine = {
        **describe(),
        "model": options.model,
        "anchors": options.anchors,
        "pretrain_epochs": options.pretrain_epochs,
    }
    cold, warm = ([row["first round"] for row in rows if row["cache"] == kind] for kind in ("cold", "warm"))
    print(f"startup cold {statistics.median(cold):.2f}")
    print(f"startup warm {statistics.median(warm):.2f}")
    print(f"startup warm/cold {statistics.median(w / c for w, c in zip(warm, cold)):.3f}")
    write(options.out, machine, rows)


if __name__ == "__main__":
    main()
