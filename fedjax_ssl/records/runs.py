"""The records of runs, read from their folders; runs that differ in nothing but the seed form a group."""

import collections
import functools
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.config import (
    complete,
    differences,
    flatten,
    labels_revealed,
    measured_each_round,
    measures_of,
    other_sections,
    who_has_labels,
)
from fedjax_ssl.data.npz import read_arrays
from fedjax_ssl.engine.evaluation import RULE
from fedjax_ssl.errors import UserError, printable
from fedjax_ssl.fields import CHANGES_NO_RESULT
from fedjax_ssl.files import read_json
from fedjax_ssl.kinds import kind_of
from fedjax_ssl.records.clients import (
    MODELS,
    OVER_CLIENTS,
    TESTED,
    accuracy_of_clients,
    figure_name,
    load_client_tests,
)
from fedjax_ssl.records.dataset import read_dataset
from fedjax_ssl.records.ending import in_words
from fedjax_ssl.records.manifest import what_is_exchanged
from fedjax_ssl.records.snapshots import BEST, load_snapshot, snapshot_files
from fedjax_ssl.records.workdir import (
    CLASS_COUNTS,
    CONFIG,
    METRICS,
    ROWS,
    SNAPSHOTS,
    TEST_INPUTS,
    TIMINGS,
    is_of_last_round,
    read_records,
    read_rounds,
    read_summary,
)

EARLIER_METRICS = {"byzantine_uploads": "malicious_uploads"}  # by their names of today


class RunRecords(NamedTuple):
    """What one run has recorded so far."""

    folder: pathlib.Path  # its workdir
    config: dict[str, Any]  # nested dicts
    metrics: list[dict[str, Any]]  # a dict for each round, at least one
    timings: list[dict[str, Any]]  # dicts with seconds of several kinds
    summary: dict[str, Any] | None  # None for a run that is not finished
    # What is wrong with the files of these records, a line each; they are shown as far as they can be read.
    damages: tuple[str, ...] = ()

    @property
    def is_finished(self) -> bool:
        """Whether all rounds are done, or the method's stopping rule ended the run."""
        return is_of_last_round(self.summary, self.metrics)

    @property
    def labels_revealed(self) -> bool:
        """Whether it is a bound that sees the clients' labels."""
        return labels_revealed(self.config)

    @property
    def measured(self) -> str:
        """The set that is measured each round, 'validation' or 'test'."""
        return measured_each_round(self.config)

    def accuracy(self) -> np.ndarray:
        """float [rounds], on the set that is measured each round."""
        return self.values(f"{self.measured}_accuracy")

    def best(self) -> tuple[float, int]:
        """The best accuracy on that set, and the first round with it."""
        accuracy = self.accuracy()
        return float(accuracy.max()), self.metrics[int(accuracy.argmax())]["round"]

    def tested(self, name: str) -> float | None:
        """A figure of the last model on the test set, such as 'test_accuracy'; None if it was not measured.

        A run with validation images has none before its end.
        """
        if self.measured == "test":
            return self.metrics[-1].get(name)
        return self.summary.get(name) if self.is_finished else None

    def measures(self) -> dict[str, str]:
        """What is measured besides accuracy and loss: the metrics' names, without the set's, -> in words."""
        return measures_of(self.config)

    def tested_measures(self) -> dict[str, str]:
        """The same of the last model on the test set: in words -> percent, '-' if it was not measured."""
        shares = {words: self.tested(f"test_{name}") for name, words in self.measures().items()}
        return {words: "-" if share is None else f"{100 * share:.2f} %" for words, share in shares.items()}

    def standing(self) -> str:
        """The rounds done, in words."""
        return f"round {self.metrics[-1]['round']} of {self.config['num_rounds']}"

    def why_ended(self) -> str:
        """Why a finished run has fewer rounds than it could have had, in words; '' if it has all."""
        return in_words(str(self.summary.get("ended_by")), self.config["stop"]) if self.is_finished else ""

    def values(self, name: str) -> np.ndarray:
        """float [rounds], one metric over the rounds; NaN where it could not be measured."""
        found = [line.get(name, line.get(EARLIER_METRICS.get(name, name))) for line in self.metrics]
        return np.array([np.nan if value is None else value for value in found], float)

    def has(self, name: str) -> bool:
        """Whether the metric was measured in any round."""
        return bool(np.isfinite(self.values(name)).any())

    def labelling_rules(self) -> dict[str, str]:
        """Metric -> the label rule in words, for each of the method's rules; {} if it makes no labels."""
        rules = {name: name.removeprefix(RULE) for name in self.metrics[0] if name.startswith(RULE)}
        if not rules and "pseudo_label_accuracy" in self.metrics[0]:
            rules = {"pseudo_label_accuracy": "all"}  # one way alone has no name
        return {name: rule.replace("_", " ") for name, rule in rules.items()}

    def seconds(self, kind: str = "seconds") -> float:
        """The sum of one kind of seconds; 'seconds' are the rounds'."""
        return sum(line.get(kind, 0.0) for line in self.timings)

    def dataset(self) -> dict[str, Any]:
        """Name, classes and pixel statistics of the images, with names that can be shown; {} if they cannot be read, or
        in folders of earlier versions.
        """
        facts = _or_empty(read_dataset, self.folder)
        if facts:
            facts["name"] = printable(str(facts.get("name")))
            facts["class_names"] = [printable(name) for name in facts.get("class_names") or ()]
        return facts

    @property
    def data_fields(self) -> tuple[Any, ...]:
        """The fields that say which images these are: runs in which they differ cannot be compared."""
        data = self.config["data"]
        which = ("source", "path", "image_size", "fit", "balanced_test", "test_path", "label_column", "text_column")
        return tuple(data[name] for name in which)

    def class_counts(self) -> dict[str, np.ndarray]:
        """Who holds what, see `fedjax_ssl.data.class_counts`; {} if it cannot be read, or in folders of earlier
        versions.
        """
        return _or_empty(functools.partial(_read_class_counts, classes=self._classes), self.folder)

    def who_has_labels(self, counted: bool = True) -> str:
        """Who holds labels, in words; `counted`: and how many the clients hold in all, where that is written down."""
        counts = self.class_counts()
        labelled = int(counts["labelled"].sum()) if counts else None
        if "unlabelled" in counts and self.config["data"]["labels"] == "clients":
            number = int(counts["clients"].sum() + counts["unlabelled"].sum())
            return f"the data have labels for {labelled:,} of the clients' {number:,} {self.noun}"
        return who_has_labels(self.config, labelled if counted else None).replace("images", self.noun)

    @property
    def noun(self) -> str:
        """What its examples are called, as in 'images' or 'rows'."""
        return kind_of(self.dataset()).noun

    def snapshots(self) -> dict[int, dict[str, np.ndarray]]:
        """Round -> its snapshot, up to the last round of the records; without those that cannot be read."""
        found = {number: _or_empty(self._load_snapshot, path) for number, path in self._snapshot_files().items()}
        return {number: snapshot for number, snapshot in found.items() if snapshot}

    def test_inputs(self) -> dict[str, np.ndarray]:
        """Of inputs that are no images the test set: `inputs` [T, ...] and `rows` int [T]; {} if it cannot be read."""
        return _or_empty(self._read_test_inputs, self.folder)

    def _read_test_inputs(self, folder: pathlib.Path) -> dict[str, np.ndarray]:
        """The arrays of test_inputs.npz; {} without the file. Raises a UserError if it has other examples."""
        path, facts = folder / TEST_INPUTS, self.dataset()
        if not path.exists() or not facts:
            return {}
        found = read_arrays(str(path), ("inputs",), optional=("rows",))
        inputs = found["inputs"]
        rows = found.setdefault("rows", np.arange(len(inputs)))  # only a csv's are written
        if rows.shape != inputs.shape[:1] or rows.dtype.kind not in "iu":
            raise UserError(f"{path} has rows that are no numbers of {len(inputs)} inputs")
        try:
            kind_of(facts).given(inputs[:, 0] if inputs.ndim == 3 else inputs, facts)  # of several views the first
        except UserError as error:
            raise UserError(f"{path} has {error}") from error
        return found

    @property
    def _classes(self) -> int | None:
        """The number of the data set's classes; None if it cannot be read."""
        return self.dataset().get("num_classes")

    def _load_snapshot(self, path: pathlib.Path) -> dict[str, np.ndarray]:
        return load_snapshot(path, self._classes)

    def _snapshot_files(self) -> dict[int, pathlib.Path]:
        last = self.metrics[-1]["round"]
        return {number: path for number, path in snapshot_files(self.folder / SNAPSHOTS).items() if number <= last}

    def client_accuracies(self) -> dict[str, np.ndarray]:
        """Model -> accuracy on each client's mix of classes, float [K]; see `fedjax_ssl.records.clients`.

        The last model is that of the last recorded round, the best one that of the best round on validation images. A
        model is left out if the folder lacks its predictions on the test set or the clients' classes.
        """
        counts, taken = self.class_counts(), {}
        end, best = self.metrics[-1]["round"], _or_empty(self._load_snapshot, self.folder / SNAPSHOTS / BEST)
        last = self._snapshot_files().get(end)
        if last is not None:
            taken[""] = _or_empty(self._load_snapshot, last)
        if self.measured == "validation" and best.get("round") == self.best()[1]:
            taken["best_"] = best
        return {
            MODELS[model]: accuracy_of_clients(snapshot["labels"], snapshot["predictions"], counts["clients"])
            for model, snapshot in taken.items()
            if counts
            and snapshot
            and snapshot["of"] == "test"
            and snapshot["labels"].max() < counts["clients"].shape[1]
        }

    def client_tests(self) -> dict[str, np.ndarray]:
        """Model -> accuracy on each client's own test images after the last round, float [K]; {} without such images.

        NaN for a client without such images.
        """
        found = _or_empty(load_client_tests, self.folder)
        if int(found.get("round", -1)) != self.metrics[-1]["round"]:
            return {}
        return {model: found[model] for model in TESTED if model in found}

    def client_figures(self) -> dict[str, float]:
        """The summary's figures over clients: name in words -> percent; {} before the summary is written."""
        names = {
            figure_name(model, figure): words + (f" ({MODELS[model]})" if model else "")
            for model in MODELS
            for figure, words in OVER_CLIENTS.items()
        }
        names |= {
            f"client_test_{model}_{figure}": f"{of}, own tests: {words}"
            for model, of in TESTED.items()
            for figure, words in OVER_CLIENTS.items()
        }
        return {
            words: 100 * self.summary[name]
            for name, words in names.items()
            if self.is_finished and isinstance(self.summary.get(name), float)
        }

    def unreadable(self) -> list[str]:
        """A line for each file of the folder that a report needs and that cannot be read."""
        readers: list[tuple[Callable[[pathlib.Path], Any], pathlib.Path]] = [
            (read_dataset, self.folder),
            (functools.partial(_read_class_counts, classes=self._classes), self.folder),
            (load_client_tests, self.folder),
            (self._read_test_inputs, self.folder),
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
    """What is read, or {} if it cannot be; `RunRecords.unreadable` says why."""
    try:
        return read(path)
    except UserError:
        return {}


def _read_class_counts(folder: pathlib.Path, classes: int | None) -> dict[str, np.ndarray]:
    """The arrays of class_counts.npz, with those that earlier versions left out; {} without the file.

    Raises:
        UserError: it cannot be read, or has no counts of so many classes.
    """
    path = folder / CLASS_COUNTS
    if not path.exists():
        return {}
    written = path.stat()
    counts = dict(_counts_in(path, written.st_mtime_ns, written.st_size))
    if "anchors" in counts:  # the name of earlier versions
        counts["server"] = counts.pop("anchors")
    shape = counts["clients"].shape if "clients" in counts else ()
    wanted = {"clients": shape, "train": shape[1:], "server": shape[1:]}
    optional = {"validation": shape[1:], "labelled": shape, "unlabelled": shape[:1]}
    wanted |= {name: of_name for name, of_name in optional.items() if name in counts}
    found = {name: array.shape for name, array in counts.items() if array.dtype.kind in "iu"}
    if len(shape) != 2 or not wanted.items() <= found.items() or classes not in (None, shape[1]):
        raise UserError(f"{path} has no counts of this run's classes")
    counts.setdefault("labelled", np.zeros_like(counts["clients"]))  # in earlier versions no client had labels
    counts.setdefault("validation", np.zeros_like(counts["train"]))  # and there were no validation images
    return counts


@functools.lru_cache(maxsize=8)
def _counts_in(path: pathlib.Path, written: int, size: int) -> dict[str, np.ndarray]:
    """A file's arrays, read once: a report asks several times, and a million clients take a second."""
    del written, size
    return read_arrays(str(path), None)


class Group(NamedTuple):
    """Runs that differ in nothing but the seed."""

    name: str  # for people, from their folders
    runs: list[RunRecords]  # at least one

    def values(self, name: str) -> np.ndarray:
        """float [seeds, rounds], one metric; NaN beyond the end of a run that is shorter than others."""
        rows = [run.values(name) for run in self.runs]
        longest = max(map(len, rows))
        return np.stack([np.pad(row, (0, longest - len(row)), constant_values=np.nan) for row in rows])

    @property
    def measured(self) -> str:
        """The set that is measured each round, 'validation' or 'test'."""
        return self.runs[0].measured

    def has(self, name: str) -> bool:
        """Whether a run measured it."""
        return any(run.has(name) for run in self.runs)


def name_data_sets(groups: list[Group]) -> list[str]:
    """The name of each group's data set; names that several data sets share get the fields that tell them apart."""
    names = [group.runs[0].dataset().get("name", group.runs[0].config["data"]["source"]) for group in groups]
    fields = [group.runs[0].data_fields for group in groups]
    sharing = {name: {fields[place] for place, other in enumerate(names) if other == name} for name in names}
    return [
        name if len(sharing[name]) == 1 else f"{name} ({printable(', '.join(map(str, filter(None, of_group))))})"
        for name, of_group in zip(names, fields)
    ]


def what_differs(groups: list[Group]) -> dict[str, list[str]]:
    """The fields in which the groups' configurations differ.

    Returns:
        Field -> its value in each group, '-' where it belongs to another method: it counts as a difference only among
        those that have it. Seeds and fields that change no result are left out.
    """
    flat = []
    for group in groups:
        config = group.runs[0].config
        fields, foreign = flatten(config), other_sections(config["method"])
        flat.append({name: str(value) for name, value in fields.items() if name.partition(".")[0] not in foreign})
    names = [name for name in dict.fromkeys(name for fields in flat for name in fields) if name not in _OF_NO_GROUP]
    values = {name: [printable(fields.get(name, "-")) for fields in flat] for name in names}
    return {name: of_groups for name, of_groups in values.items() if len({*of_groups} - {"-"}) > 1}


def read_run(folder: pathlib.Path) -> RunRecords:
    """The records of one run, finished or not.

    Raises:
        UserError: there is no run in the folder, or it has not finished a round yet, or a file cannot be read.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    if not (folder / CONFIG).exists():
        raise UserError(f"{folder} holds no run: there is no {CONFIG}")
    try:
        config = complete(read_json(folder / CONFIG))
        metrics, timings = read_rounds(folder / METRICS), read_records(folder / TIMINGS)
        summary, summary_damage = read_summary(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the run in {folder}: {' '.join(str(error).split())}") from error
    damages = tuple(filter(None, (metrics.damage, timings.damage, summary_damage, *what_is_exchanged(folder))))
    if not metrics.lines:
        raise UserError(damages[0] if damages else f"the run in {folder} has not finished a round yet")
    return RunRecords(folder, config, metrics.lines, timings.lines, summary, damages)


def find_runs(folder: pathlib.Path) -> list[pathlib.Path]:
    """The folders of runs in a folder, which may itself be one, in order of their names.

    Raises:
        UserError: there is none.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    found = [folder] if (folder / CONFIG).exists() else sorted(path.parent for path in folder.rglob(CONFIG))
    if not found:
        raise UserError(f"{folder} holds no run: there is no {CONFIG} in it or below")
    return found


def read_groups(folders: Iterable[pathlib.Path]) -> tuple[list[Group], list[str]]:
    """All runs in some folders, those that differ in nothing but the seed together; a seed counts once in a group.

    Args:
        folders: runs, or folders of runs: several seeds', or a whole sweep.

    Returns:
        The groups, in the order of the folders, and a line for each run that could not be read.

    Raises:
        UserError: a folder holds no run at all, or none of them has finished a round.
    """
    groups: dict[tuple[str, int], tuple[list[str], list[RunRecords]]] = {}
    times: collections.Counter[tuple[str, int]] = collections.Counter()
    seen, skipped = set(), []
    for folder in folders:
        rows = _sweep_rows(folder)
        places = {row: place for place, row in enumerate(rows)}
        for path in sorted(find_runs(folder), key=lambda path: places.get(_row_of(folder, path), len(places))):
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            try:
                run = read_run(path)
            except UserError as error:
                skipped.append(str(error))
                continue
            # A second run of the same seed, by another version of the code say, is not one more seed.
            same = (_but_the_seed(run.config), run.config["seed"])
            times[same] += 1
            names, runs = groups.setdefault((same[0], times[same]), ([], []))
            names.append(rows.get(_row_of(folder, path)) or _name(folder, path))
            runs.append(run)
    if not groups:
        raise UserError(skipped[0])
    named = [Group(", ".join(dict.fromkeys(names)), runs) for names, runs in groups.values()]
    return _tell_apart(named), skipped


def _sweep_rows(folder: pathlib.Path) -> dict[str, str]:
    """The rows of a sweep, see `ROWS`; {} for another folder, or if the file is damaged: then folders give names."""
    try:
        rows = read_json(folder / ROWS)
        return {place: printable(name) for place, name in rows.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _row_of(folder: pathlib.Path, run: pathlib.Path) -> str:
    """The folder of a run's row relative to the sweep's; '' for the sweep's folder itself."""
    return run.parent.relative_to(folder).as_posix() if run != folder else ""


def _but_the_seed(config: dict[str, Any]) -> str:
    """What runs must share to form a group."""
    return json.dumps(
        {name: value for name, value in flatten(config).items() if name not in _OF_NO_GROUP}, sort_keys=True
    )


_OF_NO_GROUP = {"seed", "seeds", *CHANGES_NO_RESULT}  # fields in which runs of a group may differ


def _name(given: pathlib.Path, run: pathlib.Path) -> str:
    """A run's name for people: its place below the folder that they named, without the seed's own folder."""
    place = run.resolve().relative_to(given.resolve().parent)
    parts = place.parts[:-1] if place.name.startswith("seed_") and len(place.parts) > 1 else place.parts
    # A whole sweep's rows are told apart by what lies below its folder.
    return printable("/".join(parts[1:] or parts).replace("_", " "))


def _tell_apart(groups: list[Group]) -> list[Group]:
    """Adds to equal names what differs between the groups' configurations."""
    told = []
    for group in groups:
        others = [other for other in groups if other.name == group.name and other is not group]
        if others:
            found = differences(others[0].runs[0].config, group.runs[0].config)
            own = [f"{name}={pair[1]}" for name, pair in found.items() if name not in ("seed", "seeds")]
            group = group._replace(name=f"{group.name} ({', '.join(own) or group.runs[0].folder})")
        told.append(group)
    return told
