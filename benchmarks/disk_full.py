"""Fills the disk at several moments of a run: each must end with one line and be resumed to the bit.

    mkdir /tmp/small && sudo mount -t tmpfs -o size=32m tmpfs /tmp/small
    python benchmarks/disk_full.py --folder=/tmp/small

A file fills a small file system except for a part of what a whole run needs. Prints a Markdown table: the room, the
exit status, the line, and whether the run, resumed with enough room, has the results of an uninterrupted run.
"""

import argparse
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORDS = ("--config.num_rounds=6", "--config.checkpoint_every=1", "--config.clients_per_round=3")


def run(folder: pathlib.Path) -> subprocess.CompletedProcess:
    """Trains in a folder, continuing a stopped run."""
    command = [sys.executable, str(ROOT / "launch.py"), f"--workdir={folder}", *WORDS]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def size(folder: pathlib.Path) -> int:
    """Bytes of a folder's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", required=True, help="of a small file system that is used for nothing else")
    parser.add_argument("--moments", type=int, default=10)
    options = parser.parse_args()
    small = pathlib.Path(options.folder)
    assert small.is_mount() and not list(small.iterdir()), f"{small} must be an empty file system"
    assert run(small / "whole").returncode == 0
    shutil.move(small / "whole", whole := ROOT / "runs" / "disk_full_reference")
    needed, wanted = size(whole), (whole / "metrics.jsonl").read_bytes()
    print("| room, KiB | status | line | tracebacks | resumed |\n|---|---|---|---|---|")
    failed = 0
    for number in range(options.moments):
        room = needed * (2 * number + 1) // (2 * options.moments)
        (small / "filler").write_bytes(bytes(shutil.disk_usage(small).free - room))
        stopped = run(small / "run")
        (small / "filler").unlink()
        lines = [line for line in stopped.stderr.splitlines() if line.startswith(("error:", "stopped:", "the run is"))]
        resumed = run(small / "run")
        equal = resumed.returncode == 0 and (small / "run" / "metrics.jsonl").read_bytes() == wanted
        traces = stopped.stderr.count("Traceback")
        failed += not equal or traces > 0 or (stopped.returncode not in (0, 2, 4)) or len(lines) != 1
        told = lines[-1].replace("|", "/") if lines else "-"
        print(
            f"| {room // 1024} | {stopped.returncode} | {told[:150]} | {traces} | {'equal' if equal else 'NO'} |",
            flush=True,
        )
        if traces:
            print(stopped.stderr, file=sys.stderr)
        shutil.rmtree(small / "run")
    shutil.rmtree(whole)
    print(f"failed: {failed}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
