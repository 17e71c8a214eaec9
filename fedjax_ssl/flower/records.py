"""Writes the workdir of a Flower run, at the server: records, checkpoints and summary as in a simulation."""

import os

import jax
import numpy as np

from fedjax_ssl.base.errors import UserError, say
from fedjax_ssl.base.files import expanded, replace_file
from fedjax_ssl.data import dataset_facts
from fedjax_ssl.engine.interface import State
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.ending import ROUNDS
from fedjax_ssl.records.lines import METRICS, TIMINGS
from fedjax_ssl.records.manifest import trained_with
from fedjax_ssl.records.origin import note_end, note_start
from fedjax_ssl.records.sealed import write_dataset
from fedjax_ssl.records.words import measured_each_round
from fedjax_ssl.records.workdir import CHECKPOINTS, FLOWER, Workdir
from fedjax_ssl.run.about import about
from fedjax_ssl.run.experiment import Experiment
from fedjax_ssl.run.observe.summary import summarise, to_record
from fedjax_ssl.run.wire import Traffic

COUNTED = Traffic(0, 0, 0, 0, 0)  # the bytes are among the metrics


class Records:
    """Writes a run's records and checkpoints."""

    def __init__(self, path: str | os.PathLike[str] | None, experiment: Experiment):
        """Writes nothing yet. Without a path the workdir is a fresh folder under runs/.

        Raises UserError if the folder holds a run, or cannot be written to.
        """
        self._config, self._facts = experiment.problem.config, dataset_facts(experiment.dataset)
        self._folder = Workdir(None if path is None else expanded(path), self._config.to_dict())
        self._run = trained_with(self._folder.config, experiment.dataset, experiment.partition)
        if self._folder.is_begun:
            self._folder.close()
            raise UserError(f"the workdir {path} holds a run, and a Flower run cannot be resumed: name another one")
        self._folder.decide(self._folder.config, about(self._config, experiment.dataset.tested_domains))

    def close(self) -> None:
        """Releases the folder."""
        self._folder.close()

    def begin(self, state: State) -> None:
        """Writes the configuration, the data set's facts and the first checkpoint."""
        self._folder.begin(0)
        replace_file(self._folder.path / FLOWER, "{}\n")
        write_dataset(self._folder.path, self._facts)
        note_start(self._folder.path)
        say(f"workdir {self._folder.path}")
        self._save(state)

    def add(self, state: State, metrics: dict[str, np.ndarray], seconds: float, healthy: bool) -> None:
        """Adds a round, which took `seconds` with what nodes compiled; and a checkpoint if one is due.

        An unhealthy state is not usable, and not saved.
        """
        line = to_record(metrics, COUNTED)
        self._folder.append(METRICS, [line])
        self._folder.append(TIMINGS, [{"round": line["round"], "seconds": seconds}])
        name = f"{measured_each_round(self._config)}_accuracy"
        measured = f"{name} {line[name]:.4f}, " if name in line else ""
        say(f"round {line['round']}/{self._config.num_rounds}: {measured}{seconds:.1f} s")
        if healthy and line["round"] % (self._config.checkpoint_every or 10) == 0:
            self._save(state)

    def conclude(self, state: State, tested: dict[str, np.ndarray]) -> None:
        """Writes the last checkpoint and the summary, with figures on the test set if no round's metrics have them."""
        self._save(state)
        note_end(self._folder.path)
        summary = summarise(self._config, self._folder, ROUNDS)
        self._folder.write_summary({**summary, **{name: value.item() for name, value in tested.items()}})

    def _save(self, state: State) -> None:
        self._folder.sync()
        number = int(state.round)
        checkpoints = Checkpoints(self._folder.path / CHECKPOINTS, run=self._run)
        checkpoints.save(number, jax.device_get(state), self._folder.checksum(number))
