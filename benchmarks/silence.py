"""Measures how long a command shows nothing in a terminal: the first character, program and round, the longest silence.

    python benchmarks/silence.py --workdir=/tmp/silence

Runs the quickstart with an empty compilation cache in a new terminal, and prints the figures as JSON.
"""

import argparse
import json
import os
import pathlib
import pty
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", required=True, help="does not exist yet")
    parser.add_argument("words", nargs="*", help="of launch.py")
    options = parser.parse_args()
    folder = pathlib.Path(options.workdir)
    folder.mkdir(parents=True)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "TERM": "xterm"}
    command = [sys.executable, str(ROOT / "launch.py"), f"--workdir={folder / 'run'}", *options.words]
    began = last = time.monotonic()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=ROOT)
    os.close(theirs)
    figures, silences, shown, programs = {}, [], "", 0
    while True:
        try:
            text = os.read(ours, 65536).decode(errors="replace")
        except OSError:  # the terminal is closed
            break
        now = time.monotonic()
        figures.setdefault("first_character_seconds", now - began)
        silences.append((now - last, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown[-80:]).strip()))
        for left in re.findall(r"compiling ([a-z ,]+?)  \d", text):  # programs still being compiled
            programs = max(programs, left.count(",") + 1)
            if left.count(",") + 1 < programs:
                figures.setdefault("first_program_seconds", now - began)
        if "qualified" in text:
            figures.setdefault("first_round_seconds", now - began)
        last, shown = now, shown + text
    figures["status"], figures["seconds"] = process.wait(), time.monotonic() - began
    figures["longest_silences"] = [f"{seconds:.2f} s after {text!r}" for seconds, text in sorted(silences)[:-6:-1]]
    figures["raw_lines_of_xla"] = len(re.findall(r"Very slow compile|^[WE]\d{4} ", shown, re.MULTILINE))
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
