"""Reads the records of a run from its folder."""

import functools
import json
import pathlib
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.base.errors import UserError, printable
from fedjax_ssl.base.fields import flatten
from fedjax_ssl.base.imports import name_of
from fedjax_ssl.data.kinds import kind_name, kind_of
from fedjax_ssl.records.clients import FIGURES, TESTED, accuracy_of_clients, client_sizes, load_client_tests
from fedjax_ssl.records.ending import in_words
from fedjax_ssl.records.fitting import read_fitting
from fedjax_ssl.records.lines import METRICS, TIMINGS, is_of_last_round, read_records, read_rounds, read_summary
from fedjax_ssl.records.manifest import what_is_exchanged
from fedjax_ssl.records.sealed import read_dataset
from fedjax_ssl.records.snapshots import load_snapshot, snapshot_files
from fedjax_ssl.records.words import labels_revealed, measured_each_round, number_of, who_has_labels
from fedjax_ssl.records.workdir import CLASS_COUNTS, CONFIG, SNAPSHOTS, read_about, read_config

_COUNTS = {"clients": "iu KC", "labelled": "iu KC", **dict.fromkeys(("train", "server", "validation"), "iu C")}
RULE = "pseudo_label_accuracy_"  # how the metrics' names of labelling rules begin


class RunRecords(NamedTuple):
    """What one run has recorded so far."""

    folder: pathlib.Path  # its workdir
    config: dict[str, Any]  # nested dicts
    metrics: list[dict[str, Any]]  # the lines of metrics.jsonl, at least one
    timings: list[dict[str, Any]]  # the lines of timings.jsonl, with seconds of several kinds
    summary: dict[str, Any] | None  # None for a run that is not finished
    about: Mapping[str, Any] = types.MappingProxyType({})  # see `fedjax_ssl.records.workdir.read_about`
    # A line for each thing that is wrong with the files; the records have what can be read.
    damages: tuple[str, ...] = ()

    @property
    def is_finished(self) -> bool:
        """Whether all rounds are done, or a rule of `config.stop` ended the run."""
        return is_of_last_round(self.summary, self.metrics)

    @property
    def other_sections(self) -> set[str]:
        """The sections of the configuration that belong to other methods."""
        return set(self.about["methods"]) - {name_of(self.config["method"])}

    @property
    def labels_revealed(self) -> bool:
        """Whether the run is an upper bound that sees the clients' labels."""
        return labels_revealed(self.config)

    @property
    def measured(self) -> str:
        """The set that is measured each round, 'validation' or 'test'."""
        return measured_each_round(self.config)

    @property
    def is_of_server_alone(self) -> bool:
        """Whether no client has sent anything."""
        return not self.values("bytes_up").any()

    def tests(self) -> list[dict[str, Any]]:
        """The lines of the rounds with a test, see `eval_every`; the first round is one of them."""
        return [line for line in self.metrics if f"{self.measured}_accuracy" in line]

    def accuracy(self) -> np.ndarray:
        """Accuracy on the set that is measured each round, float [tests]."""
        return self._replace(metrics=self.tests()).values(f"{self.measured}_accuracy")

    def best(self) -> tuple[float, int]:
        """The best of `accuracy`, and the first round with it."""
        accuracy = self.accuracy()
        place = int(np.nan_to_num(accuracy, nan=-1.0).argmax())
        return float(accuracy[place]), self.tests()[place]["round"]

    def tested(self, name: str) -> float | None:
        """A figure of the last model on the test set, such as 'test_accuracy'; None if it was not measured.

        Before a run's end only a round with a test on this set has it, and no round of a run with validation images.
        """
        figures = self.summary if self.is_finished and name not in self.metrics[-1] else self.metrics[-1]
        return figures.get(name)

    def measures(self) -> dict[str, str]:
        """What is measured besides accuracy and loss: names of metrics, without that of the set, -> words."""
        return self.about.get("measures", {})

    def tested_measures(self) -> dict[str, str]:
        """`measures` of the last model on the test set: words -> percent, '-' if it was not measured."""
        shares = {words: self.tested(f"test_{name}") for name, words in self.measures().items()}
        return {words: "-" if share is None else f"{100 * share:.2f} %" for words, share in shares.items()}

    def standing(self) -> str:
        """The rounds done, in words."""
        return f"round {self.metrics[-1]['round']} of {self.config['num_rounds']}"

    def why_ended(self) -> str:
        """Why a finished run has fewer rounds than it could have had, in words; '' if it has all."""
        return in_words(str(self.summary.get("ended_by")), self.config["stop"]) if self.is_finished else ""

    def values(self, name: str) -> np.ndarray:
        """One metric over the rounds, float [rounds]; NaN if it could not be measured."""
        found = [line.get(name) for line in self.metrics]
        return np.array([np.nan if value is None else value for value in found], float)

    def by_client(self) -> dict[str, np.ndarray]:
        """The metrics with a number for each client, float [rounds, K]; NaN where a client has none."""
        last = {name: value for name, value in self.metrics[-1].items() if isinstance(value, list)}
        return {
            name: np.array([line.get(name, [None] * len(value)) for line in self.metrics], float)
            for name, value in last.items()
        }

    def has(self, name: str) -> bool:
        """Whether the metric was measured in any round."""
        return bool(np.isfinite(self.values(name)).any())

    def labelling_rules(self) -> dict[str, str]:
        """Metric -> the label rule in words, for each of the method's rules; {} if it makes no labels."""
        rules = {name: name.removeprefix(RULE) for name in self.metrics[0] if name.startswith(RULE)}
        if not rules and "pseudo_label_accuracy" in self.metrics[0]:
            rules = {"pseudo_label_accuracy": "all"}  # a single rule has no name
        return {name: rule.replace("_", " ") for name, rule in rules.items()}

    def seconds(self, kind: str = "seconds") -> float:
        """The sum of one kind of seconds; 'seconds' are the rounds'."""
        return sum(line.get(kind) or 0.0 for line in self.timings)

    def dataset(self) -> dict[str, Any]:
        """Name, classes and statistics of the data set, with escaped names; {} if they cannot be read."""
        facts = _or_empty(read_dataset, self.folder)
        if facts:
            facts["name"] = printable(str(facts.get("name")))
            facts["class_names"] = [printable(name) for name in facts.get("class_names") or ()]
        return facts

    @property
    def data_fields(self) -> tuple[Any, ...]:
        """The values of fields that say where the examples are from."""
        data = self.config["data"]
        which = ("source", "path", "image_size", "fit", "test_path", "label_column", "text_column")
        return (*(data[name] for name in which), tuple(data["unknown_classes"]))

    @property
    def content(self) -> str:
        """What identifies the examples: their checksums; without them the fields that say where they are from."""
        return json.dumps(self.dataset().get("content") or self.data_fields, sort_keys=True)

    def class_counts(self) -> dict[str, np.ndarray]:
        """Who holds what, see `fedjax_ssl.data.class_counts`; {} if it cannot be read."""
        return _or_empty(self._read_class_counts, self.folder / CLASS_COUNTS)

    def _read_class_counts(self, path: pathlib.Path) -> dict[str, np.ndarray]:
        if not path.exists():
            return {}
        written = path.stat()
        return _counts_in(path, self.dataset().get("num_classes"), (written.st_mtime_ns, written.st_size))

    def who_has_labels(self, counted: bool = True) -> str:
        """Who holds labels, in words; `counted`: with the number of labels at all clients, if it is recorded."""
        counts = self.class_counts()
        labelled = int(counts["labelled"].sum()) if counts else None
        if "unlabelled" in counts and self.config["data"]["labels"] in ("clients", "profile"):
            number, at_server = client_sizes(counts).sum(), counts["server"].sum()
            before = f"{number_of(at_server, 'label')} at the server, and " if at_server else ""
            return f"{before}the data have labels for {labelled:,} of the clients' {number:,} {self.noun}"
        return who_has_labels(self.config, self.noun, labelled if counted else None)

    @property
    def kind(self) -> str:
        """The kind of its examples, a name in `fedjax_ssl.data.kinds.KINDS`, such as 'image'."""
        return kind_name(self.dataset())

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of an example as the network takes it."""
        return kind_of(self.dataset()).inputs(self.dataset()).shape

    @property
    def noun(self) -> str:
        """What its examples are called, as in 'images' or 'rows'."""
        return kind_of(self.dataset()).noun

    def snapshots(self) -> dict[int, dict[str, np.ndarray]]:
        """Round -> its snapshot, up to the last round of the records; without those that cannot be read."""
        found = {number: _or_empty(self._load_snapshot, path) for number, path in self._snapshot_files().items()}
        return {number: snapshot for number, snapshot in found.items() if snapshot}

    def class_names(self) -> list[str]:
        """The data set's names of its classes, or their numbers; [] if not even their number can be read."""
        dataset, counts = self.dataset(), self.class_counts()
        number = dataset.get("num_classes") or (len(counts["train"]) if counts else 0)
        names = dataset.get("class_names", [])
        return names if len(names) == number else [str(label) for label in range(number)]

    def _load_snapshot(self, path: pathlib.Path) -> dict[str, np.ndarray]:
        return load_snapshot(path, len(self.class_names()) or None)

    def _snapshot_files(self) -> dict[int, pathlib.Path]:
        last = self.metrics[-1]["round"]
        return {number: path for number, path in snapshot_files(self.folder / SNAPSHOTS).items() if number <= last}

    def last_test_outputs(self) -> dict[str, np.ndarray]:
        """The last model's outputs on the test set, see `make_snapshot`; {} if they cannot be read."""
        path = self._snapshot_files().get(self.metrics[-1]["round"])
        taken = {} if path is None else _or_empty(self._load_snapshot, path)
        return taken if taken and taken["of"] == "test" else {}

    def client_accuracy(self) -> np.ndarray | None:
        """The last model's accuracy on each client's mix of classes, float [K]; see `fedjax_ssl.records.clients`.

        None if the folder lacks its predictions on the test set or the clients' classes.
        """
        counts, taken = self.class_counts(), self.last_test_outputs()
        if not counts or not taken:
            return None
        return accuracy_of_clients(taken["labels"], taken["predictions"], counts["clients"])

    def client_tests(self) -> dict[str, np.ndarray]:
        """Model -> accuracy on each client's own test images at the end, float [K], NaN without; {} if none."""
        found = _or_empty(load_client_tests, self.folder)
        if int(found.get("round", -1)) != self.metrics[-1]["round"]:
            return {}
        return {model: found[model] for model in TESTED if model in found}

    def client_figures(self) -> dict[str, float]:
        """The summary's figures over clients: name in words -> percent; {} before the summary is written."""
        return {
            words: 100 * self.summary[name]
            for name, words in FIGURES.items()
            if self.is_finished and isinstance(self.summary.get(name), float)
        }

    def unreadable(self) -> list[str]:
        """A line for each file of the folder that a report needs but that cannot be read."""
        readers: list[tuple[Callable[[pathlib.Path], Any], pathlib.Path]] = [
            (read_dataset, self.folder),
            (self._read_class_counts, self.folder / CLASS_COUNTS),
            (load_client_tests, self.folder),
            *((self._load_snapshot, path) for path in self._snapshot_files().values()),
        ]
        lines = []
        for read, path in readers:
            try:
                read(path)
            except UserError as error:
                lines.append(str(error))
        return lines


def _or_empty(read: Callable[[pathlib.Path], dict[str, Any]], path: pathlib.Path) -> dict[str, Any]:
    """The result of `read`; {} if the file cannot be read, for which `RunRecords.unreadable` gives the reason."""
    try:
        return read(path)
    except UserError:
        return {}


@functools.lru_cache(maxsize=8)
def _counts_in(path: pathlib.Path, classes: int | None, written: tuple[int, int]) -> dict[str, np.ndarray]:
    """The counts in a file, cached: a report reads them several times, and a million clients take a second."""
    del written  # when it was, and how much
    return read_fitting(path, _COUNTS, {"unlabelled": "iu K", "unknown": "iu K"}, C=classes)


def read_run(folder: pathlib.Path) -> RunRecords:
    """The records of one run, finished or not.

    Raises a UserError if there is no run in the folder, it has not finished a round yet, or a file is damaged; an
    OSError if a file of the records cannot be opened.
    """
    config, about = read_config(folder), read_about(folder)
    _check_fields(config, about["defaults"], str(folder / CONFIG))
    metrics, timings = read_rounds(folder / METRICS), read_records(folder / TIMINGS)
    summary, summary_damage = read_summary(folder)
    damages = tuple(filter(None, (metrics.damage, timings.damage, summary_damage, *what_is_exchanged(folder))))
    if not metrics.lines:
        raise UserError(damages[0] if damages else f"the run in {folder} has not finished a round yet")
    return RunRecords(folder, config, metrics.lines, timings.lines, summary, about, damages)


def _check_fields(config: dict[str, Any], defaults: dict[str, Any], where: str) -> None:
    """Raises a UserError unless a configuration has all fields, each of its default's kind."""
    found, kinds = flatten(config), {int: (int, float), float: (int, float)}
    for name, default in flatten(defaults).items():
        value = found.get(name, "missing")
        if None not in (default, value) and not isinstance(value, kinds.get(type(default), type(default))):
            raise UserError(f"{where}: {name} is {value!r}, but must be of the kind of {default!r}")


def find_runs(folder: pathlib.Path) -> list[pathlib.Path]:
    """The folders of runs in a folder, which may itself be one, in order of their names.

    What lies inside a run's folder, such as an export, is no further run. Raises a UserError if there is none.
    """
    found = {folder} if (folder / CONFIG).exists() else {path.parent for path in folder.rglob(CONFIG)}
    if not found:
        raise UserError(f"{folder} holds no run: there is no {CONFIG} in it or below")
    return sorted(path for path in found if found.isdisjoint(path.parents))
