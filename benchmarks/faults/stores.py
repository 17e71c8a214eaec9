"""A run of 100,000 clients with their memory in clients.sqlite gets SIGKILL at random moments while rows are written.

It is started again each time, and finally left to end. 'right': metrics.jsonl has the same bytes in the end, and the
last checkpoint and every client's row the same numbers, as in an undisturbed run.
"""

import pathlib
import sqlite3
from collections.abc import Iterator

import giant
import numpy as np

from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.workdir import CLIENTS as FILE
from fedjax_ssl.run.experiment import build_experiment

from .common import Row, Trial, config_of, same
from .kills import kill

MINUTES, COUNT = 60, 10
METHODS = ("fedu", "fedema")
CLIENTS, ROUNDS, COHORT = 100_000, 30, 10
_NEWEST = "SELECT client, max(round), data FROM rows GROUP BY client ORDER BY client"


def run(trial: Trial) -> Iterator[Row]:
    """Yields the part's rows."""
    data = trial.folder / "data"
    giant.make(giant.Case(np.full(CLIENTS, 2)), data)
    stored = {
        "residence.clients": "disk", "num_rounds": ROUNDS, "clients_per_round": COHORT, "num_clients": CLIENTS,
        "data.source": "npz", "data.path": str(data / "data.npz"), "data.server_labels": giant.SERVER,
        "data.partition_file": str(data / "partition.npz"), "data.examples_per_client": 0,
        "model.projector_hidden": 128, "model.projector_dim": 64,
    }  # fmt: skip

    def same_state(method: str, workdir: pathlib.Path, whole: pathlib.Path) -> bool:
        config = config_of(method, every=1)
        config.update_from_flattened_dict(stored)
        shape = build_experiment(config).state_shape._replace(clients={})
        states, rows = [], []
        for folder in (workdir, whole):
            states.append(Checkpoints(folder / "checkpoints").restore(shape).state)
            with sqlite3.connect(folder / FILE) as file:
                rows.append(file.execute(_NEWEST).fetchall())
        return same(*states) and rows[0] == rows[1] and len(rows[0]) > ROUNDS * COHORT // 2

    for place, method in enumerate(METHODS):
        if not trial.goes_on():
            break
        yield kill(trial, method, stored, trial.share(place, len(METHODS)), FILE, 1, same_state)
