"""Shared by the parts: a row of the table, the time left, and runs of a few seconds."""

import collections
import os
import pathlib
import pickle
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_ssl import base_config
from fedjax_ssl.config import apply_arguments
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.run.experiment import build_experiment

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
ROUNDS = 6
FIELDS = {
    "num_rounds": ROUNDS, "num_clients": 8, "clients_per_round": 4, "data.source": "digits", "data.server_labels": 40,
    "data.examples_per_client": 33, "model.name": "cnn", "augment.padding": 1, "augment.flavour": "none",
    "server.augmentation": "weak", "client.epochs": 1, "server.pretrain_epochs": 1, "log.report": False,
    "log.tensorboard": False,
}  # fmt: skip


class Row(NamedTuple):
    """The outcomes of one fault's tries. Each try counts once, as one of the five outcomes.

    Attributes:
        fault: what was done, and to what.
        right: the fault did no harm: the results are those without it, to the bit if that is promised.
        told: one clear line names the fault, and nothing damaged is used.
        silent: different or damaged results without a message.
        lost: results are gone, or a process never ends.
        tracebacks: a traceback, or a process that crashed.
        note: further figures.
    """

    fault: str
    right: int = 0
    told: int = 0
    silent: int = 0
    lost: int = 0
    tracebacks: int = 0
    note: str = ""

    @property
    def tries(self) -> int:
        """The number of all outcomes."""
        return self.right + self.told + self.bad

    @property
    def bad(self) -> int:
        """The number of outcomes that must not occur."""
        return self.silent + self.lost + self.tracebacks


def row_of(fault: str, outcomes: collections.Counter, note: str = "") -> Row:
    """A row of outcomes counted by name."""
    return Row(fault, **outcomes, note=note)


class Trial:
    """The input of a part.

    Attributes:
        folder: an empty folder for the part.
        rng: its only source of random numbers.
        count: total number of tries.
    """

    def __init__(self, folder: pathlib.Path, seed: int, count: int, minutes: float):
        self.folder, self.rng, self.count = folder, random.Random(seed), count
        self._ends = time.monotonic() + 60 * minutes

    def goes_on(self) -> bool:
        """Whether there is time for another try."""
        return time.monotonic() < self._ends

    def share(self, place: int, places: int) -> int:
        """How many tries one of several methods gets."""
        return self.count // places + (place < self.count % places)


def config_of(method: str, every: int):
    """A run of a few seconds."""
    config = apply_arguments(base_config(), method)
    config.update_from_flattened_dict({**FIELDS, "checkpoint_every": every})
    return config


def restore(workdir: pathlib.Path, config):
    """The newest undamaged checkpoint."""
    return Checkpoints(workdir / "checkpoints").restore(build_experiment(config).state_shape)


def same(one, other) -> bool:
    """Whether two trees have the same numbers, to the bit; NaN equals NaN."""
    leaves, others = jax.tree.leaves(one), jax.tree.leaves(other)
    return len(leaves) == len(others) and all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(leaves, others)
    )


def words(fields: dict) -> list[str]:
    """Fields as command-line arguments."""
    return [f"--config.{name}={str(value).lower()}" for name, value in fields.items()]


def launch(*arguments: str, **options) -> subprocess.Popen:
    """Starts the command line in a new process; its stderr is a pipe unless the options differ."""
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, **options}
    environment = {**os.environ, **options.pop("env", {})}
    command = [sys.executable, str(ROOT / "launch.py"), *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, **options)


def start(method: str, workdir: pathlib.Path, options: Mapping[str, Any] = {}, **fields) -> subprocess.Popen:
    """Starts a run of a few seconds by the command line, with the options of `launch`."""
    config = f"--config={ROOT}/configs/quickstart.py:{method}"
    return launch(config, *words({**FIELDS, "checkpoint_every": 1, **fields}), f"--workdir={workdir}", **options)


def in_processes(part: str, cases: list[tuple], folder: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yields the outcome of each case and its reason, from a part's `read_cases` in a separate process.

    The process gets the folder's path as argument and the pickled cases on stdin, and prints a line for each case. If
    it dies, another process continues after the case at which it died.
    """
    done, said = 0, folder / "stderr_of_a_process"
    while done < len(cases):
        command = [sys.executable, "-c", f"from faults import {part}; {part}.read_cases()", str(folder)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": said.open("w")}
        with subprocess.Popen(command, cwd=ROOT / "benchmarks", **pipes) as process:
            try:
                process.stdin.write(pickle.dumps(cases[done:]))
                process.stdin.close()
                for line in process.stdout:
                    done += 1
                    outcome, why = line.decode().rstrip("\n").split("\t", 1)
                    yield outcome, why
            except GeneratorExit:  # no more cases are wanted
                process.kill()
                raise
        if process.returncode != 0 and done < len(cases):
            done += 1
            yield "tracebacks", f"the process ended with {process.returncode} {said.read_text().splitlines()[-1:]}"


def limit_memory(more: int) -> None:
    """Limits this process's memory to so many bytes above its present memory."""
    taken = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + more, taken + more))
