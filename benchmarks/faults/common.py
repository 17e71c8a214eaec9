"""What the parts share: a row of the table, the time that is left, and runs of some seconds."""

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
    """What came of the tries of one fault. Each try counts once, as one of the five outcomes.

    Attributes:
        fault: what was done, and to what.
        right: the fault did no harm: the results are those without it, to the bit where that is promised.
        told: one clear line names the fault, and nothing is taken that is damaged.
        silent: other results, or damaged ones, without a word.
        lost: results that are gone, or a process that never ends.
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
        """All outcomes together."""
        return self.right + self.told + self.bad

    @property
    def bad(self) -> int:
        """The outcomes that must not be."""
        return self.silent + self.lost + self.tracebacks


def row_of(fault: str, outcomes: collections.Counter, note: str = "") -> Row:
    """A row of outcomes that were counted by name."""
    return Row(fault, **outcomes, note=note)


class Trial:
    """What a part is given.

    Attributes:
        folder: an empty one, of the part's own.
        rng: its only source of random numbers.
        count: the tries to be made, in all.
    """

    def __init__(self, folder: pathlib.Path, seed: int, count: int, minutes: float):
        self.folder, self.rng, self.count = folder, random.Random(seed), count
        self._ends = time.monotonic() + 60 * minutes

    def goes_on(self) -> bool:
        """Whether there is time for another try."""
        return time.monotonic() < self._ends

    def share(self, place: int, places: int) -> int:
        """How many of the tries one of several methods gets."""
        return self.count // places + (place < self.count % places)


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


def words(fields: dict) -> list[str]:
    """Fields as words of a command line."""
    return [f"--config.{name}={str(value).lower()}" for name, value in fields.items()]


def launch(*arguments: str, **options) -> subprocess.Popen:
    """The command line in a process of its own, whose stderr is a pipe unless the options say otherwise."""
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, **options}
    environment = {**os.environ, **options.pop("env", {})}
    command = [sys.executable, str(ROOT / "launch.py"), *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, **options)


def start(method: str, workdir: pathlib.Path, options: Mapping[str, Any] = {}, **fields) -> subprocess.Popen:
    """A run of some seconds, by the command line; options are those of `launch`."""
    config = f"--config={ROOT}/configs/quickstart.py:{method}"
    return launch(config, *words({**FIELDS, "checkpoint_every": 1, **fields}), f"--workdir={workdir}", **options)


def in_processes(part: str, cases: list[tuple], folder: pathlib.Path) -> Iterator[tuple[str, str]]:
    """The outcome of each case and why, by `read_cases` of a part in a process of its own.

    It gets the folder's path as its argument and the cases in a pickle on stdin, and prints a line for each. A process
    that dies is followed by another, for the cases behind the one that did it.
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
            except GeneratorExit:  # nobody wants more
                process.kill()
                raise
        if process.returncode != 0 and done < len(cases):
            done += 1
            yield "tracebacks", f"the process ended with {process.returncode} {said.read_text().splitlines()[-1:]}"


def limit_memory(more: int) -> None:
    """Lets this process take no more memory than so many bytes above what it has now."""
    taken = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + more, taken + more))
