"""A run's folder: the names of its files, its configuration, and `Workdir`, which writes into it."""

import contextlib
import functools
import json
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from fedjax_ssl.base.errors import BusyError, UserError, first_line
from fedjax_ssl.base.fields import CHANGES_NO_RESULT, differences, flatten
from fedjax_ssl.base.files import free_name, read_json, read_whole, replace_file, replaced
from fedjax_ssl.base.imports import CODE_FIELDS, is_own, name_of
from fedjax_ssl.records.lines import (
    METRICS,
    SUMMARY,
    TIMINGS,
    checksum_of_records,
    finite,
    read_records,
    read_rounds,
    to_line,
)

try:
    import fcntl
except ImportError:  # on Windows, where the folder is not locked
    fcntl = None

CONFIG = "config.json"
ABOUT = "about.json"  # what reports say of the run's method, and the fields' defaults
PARTITION, CHECKPOINTS, INIT_FROM = "partition.npz", "checkpoints", "init_from.json"
BEST = "best"  # the model of the best round on validation images, as a checkpoint
DATASET, CLASS_COUNTS, SNAPSHOTS = "dataset.json", "class_counts.npz", "snapshots"
CLIENTS = "clients.sqlite"  # the clients' memory, if it is not in the checkpoints
ORIGIN, ORIGIN_FILES, LOG = "origin.json", "origin", "run.log"
LOCK, TENSORBOARD = ".lock", "tensorboard"
SECRET = "secret.json"  # of a private run
FLOWER = "flower.json"  # marks a Flower run
ROWS = "rows.json"  # of a sweep: a row's folder -> its name, in the table's order
SEEDS = "seeds.json"  # of a workdir of several seeds, above their runs
HOLDS = {CONFIG: "a run", SEEDS: "runs of several seeds", ROWS: "a sweep"}  # file -> what a folder with it holds
MOST_LISTED = 5  # fields in a message
REPORT, FIGURES, MODEL_CARD = "report.html", "figures", "MODEL_CARD.md"


def fresh_workdir(name: str) -> pathlib.Path:
    """Makes and returns the first of runs/name-001, runs/name-002, ... that does not exist yet."""
    number = 1
    while True:
        workdir = pathlib.Path("runs") / f"{name}-{number:03d}"
        try:
            workdir.mkdir(parents=True)
            return workdir
        except FileExistsError:
            number += 1


def check_folder(path: str | os.PathLike[str]) -> None:
    """Raises a UserError unless files can be written into a folder, which need not exist; leaves nothing behind."""
    folder, made = pathlib.Path(path), []
    try:
        if not os.fspath(path) or (folder.exists() and not folder.is_dir()):
            raise ValueError(f"{os.fspath(path) or 'an empty path'} is not a folder")
        # Made and removed, because permissions do not show that a disk is read-only or a name too long.
        made = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot write to the workdir {str(folder)[:200]!r}: {reason}") from error
    finally:
        for place in made:
            with contextlib.suppress(OSError, ValueError):  # it was not made, or another process made something in it
                place.rmdir()


def refuse_others(folder: pathlib.Path, own: str) -> None:
    """Raises a UserError if a folder holds something of another kind, since reports would show only one of the two.

    `own` is the name in `HOLDS` of what is to be trained in it.
    """
    other = next((what for name, what in HOLDS.items() if name != own and (folder / name).exists()), None)
    if other:
        raise UserError(f"the workdir {folder} holds {other}; choose another workdir")


def save_seeds(folder: pathlib.Path, seeds: tuple[int, ...]) -> None:
    """Adds seeds to the list of those that commands train in a folder's subfolders, which may not exist yet."""
    folder.mkdir(parents=True, exist_ok=True)
    earlier: tuple[int, ...] = ()
    with contextlib.suppress(UserError):  # a damaged list is replaced
        earlier = read_seeds(folder)
    replace_file(folder / SEEDS, json.dumps(list(dict.fromkeys([*earlier, *seeds]))) + "\n")


def read_seeds(folder: pathlib.Path) -> tuple[int, ...]:
    """The list of `save_seeds`; () without one. Raises a UserError if it cannot be read."""
    try:
        return tuple(map(int, read_json(folder / SEEDS))) if (folder / SEEDS).is_file() else ()
    except (OSError, ValueError, TypeError, OverflowError) as error:  # OverflowError: Infinity as a seed
        raise UserError(f"cannot read {folder / SEEDS}: {first_line(error)}") from error


def read_config(folder: pathlib.Path, name: str = CONFIG) -> dict[str, Any]:
    """A run's configuration as it was saved in the file `name`. Raises a UserError if it cannot be read or is none."""
    return _read_dict(folder / name, "method")


def read_about(folder: pathlib.Path) -> dict[str, Any]:
    """What a run's folder says of its method. Raises a UserError if it cannot be read.

    Returns:
        title: of the method.
        paper: its paper's address; '' without one.
        methods: all methods, whose sections are in the configuration.
        defaults: the fields' defaults, nested as in the configuration.
        measures: what is measured besides accuracy and loss: names of metrics, without that of the set, -> words.
        decided: fields that the data decided -> what was asked for, and what the run has; optional.
    """
    return _read_dict(folder / ABOUT, "title")


def _read_dict(path: pathlib.Path, entry: str) -> dict[str, Any]:
    """The dict in a JSON file, which must have this entry, a text."""
    try:
        found = read_json(path)
        if not isinstance(found, dict) or not isinstance(found.get(entry), str):
            raise ValueError(f"it has no {entry}")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"cannot read the run in {path.parent}: {path.name}: {reason}") from error
    return found


def refuse_code(folder: pathlib.Path, config: Mapping[str, Any], remedy: str) -> None:
    """Raises a UserError if a saved configuration names code; `remedy` is what to do if the user trusts the folder."""
    fields = flatten(config)
    for field, name in ((field, str(fields.get(field))) for field in CODE_FIELDS):
        if is_own(name):
            raise UserError(f"the run in {folder} names code, {field}={name}, which would be run; {remedy}")


def as_decided(config: dict[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with what the data of a run decided, in fields with the values that the run was asked for."""
    config = json.loads(json.dumps(config))
    for name, (asked, has) in about.get("decided", {}).items():
        *sections, field = name.split(".")
        section = functools.reduce(dict.__getitem__, sections, config)
        if section[field] == asked:
            section[field] = has
    return config


def forbidden_changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The changed fields, with their values, that prevent a run from being resumed; '' if there are none.

    Fields that change no result may change, a run with a constant schedule may get more rounds, and the rules of
    `config.stop` may be relaxed.
    """
    # Data and weights may have moved: checksums tell others, see `fedjax_ssl.records.manifest`.
    allowed = {*CHANGES_NO_RESULT, "stop.seconds", "data.path", "encoder.weights"}
    refused = {name: pair for name, pair in differences(old, new).items() if name not in allowed}
    numbers = {name: pair for name, pair in refused.items() if all(isinstance(each, int | float) for each in pair)}
    before, now = numbers.get("num_rounds", (0, 0))
    if before < now and new.get("schedule") == "constant":
        del refused["num_rounds"]
    for name in ("stop.patience", "stop.bytes"):  # the rounds until then are the same
        before, now = numbers.get(name, (0, 0))
        if before and (not now or now > before):
            del refused[name]
    lines = [f"{name}: {before!r} there, {now!r} here" for name, (before, now) in refused.items()]
    return "; ".join([*lines[:MOST_LISTED], *([f"and {len(lines) - MOST_LISTED} more"] * (len(lines) > MOST_LISTED))])


class Workdir:
    """The folder of one run. Nothing is written before `begin`."""

    def __init__(self, path: str | os.PathLike[str] | None, config: dict[str, Any]):
        """Checks that this configuration may run in this folder, which need not exist, and locks the folder.

        Without a path a fresh folder under runs/ is taken when the run begins. Raises a UserError if the folder holds a
        run of another configuration, or something that is not a run, or another process is using it.
        """
        check_folder("runs" if path is None else path)  # before anything slow
        self.path = None if path is None else pathlib.Path(path)
        self.config = json.loads(json.dumps(config))  # as it will be read: JSON turns tuples into lists
        self._about: dict[str, Any] = {}
        self._decided: dict[str, Any] = {}  # see `read_about`
        self.is_changed = False  # whether METRICS has lines that were changed, so that `begin` keeps a copy
        self._files: dict[str, Any] = {}
        self.is_begun = path is not None and (self.path / CONFIG).exists()
        if path is None:
            return
        if self.is_begun:
            self._check_same_run()
            self._lock()
        else:
            refuse_others(self.path, CONFIG)
            ours = [name for name in (METRICS, SUMMARY, CHECKPOINTS) if (self.path / name).exists()]
            if ours:
                raise UserError(f"the workdir {self.path} holds {ours[0]} but no {CONFIG}; choose another workdir")

    def _check_same_run(self) -> None:
        if (self.path / FLOWER).exists():
            raise UserError(f"the run in {self.path} is a Flower run, which cannot be resumed; choose another workdir")
        with contextlib.suppress(UserError):  # a damaged file, which is written again
            known = read_about(self.path)
            self.config, self._decided = as_decided(self.config, known), known.get("decided", {})
        self._refuse_changes()

    def _refuse_changes(self) -> None:
        if fields := forbidden_changes(read_config(self.path), self.config):
            line = f"the workdir {self.path} holds a run of another configuration ({fields}); choose another workdir"
            raise UserError(line)

    def decide(self, config: dict[str, Any], about: dict[str, Any]) -> None:
        """Takes a configuration in which the data have decided some fields, and what `read_about` will say of it.

        Raises a UserError if the folder holds a run for which they decided otherwise.
        """
        config, self._about = json.loads(json.dumps(config)), dict(about)
        self._decided = {**self._decided, **differences(self.config, config)}
        self.config = config
        if self.is_begun:
            self._refuse_changes()

    def begin(self, round_number: int) -> None:
        """Writes the configuration, and cuts the records back to `round_number`, where the run resumes.

        Raises a UserError if the folder cannot be written to, or (BusyError) another process was faster.
        """
        if self.path is None:
            self.path = fresh_workdir(name_of(self.config["method"]))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock()
            if not self.is_begun and (self.path / CONFIG).exists():
                raise self._busy()  # another process began a run, and perhaps ended it, since the check
            records = {METRICS: read_rounds(self.path / METRICS), TIMINGS: read_records(self.path / TIMINGS)}
            # From here on files are changed.
            for name in (SUMMARY, REPORT, MODEL_CARD):
                (self.path / name).unlink(missing_ok=True)  # they are of fewer rounds
            replace_file(self.path / CONFIG, json.dumps(self.config, indent=2) + "\n")
            if self._about:
                replace_file(self.path / ABOUT, json.dumps({**self._about, "decided": self._decided}, indent=2) + "\n")
            for name, found in records.items():
                if found.damage or (name == METRICS and self.is_changed):
                    with replaced(free_name(self.path / f"{name}.set_aside")) as copy:
                        copy.write(read_whole(self.path / name))
                kept = [line for line in found.lines if line["round"] <= round_number]
                replace_file(self.path / name, "".join(map(to_line, kept)))
                self._files[name] = (self.path / name).open("a")
        except OSError as error:
            raise UserError(f"cannot write to the workdir {self.path}: {error.strerror}") from error

    def _lock(self) -> None:
        """Locks the folder against other processes, until this process ends, even if it is killed."""
        if fcntl is None or "lock" in self._files:
            return
        self._files["lock"] = (self.path / LOCK).open("a")
        try:
            fcntl.flock(self._files["lock"], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise self._busy() from None

    def _busy(self) -> BusyError:
        self.close()
        return BusyError(self.path)

    def append(self, name: str, lines: list[dict[str, Any]]) -> None:
        """Appends lines to METRICS or TIMINGS and flushes them to the operating system."""
        self._files[name].write("".join(map(to_line, lines)))
        self._files[name].flush()

    def sync(self) -> None:
        """Waits until all lines are on the disk, before a checkpoint relies on them."""
        for name in (METRICS, TIMINGS):
            os.fsync(self._files[name].fileno())

    def checksum(self, round_number: int) -> str:
        """See `checksum_of_records`."""
        return checksum_of_records(self.path, round_number)

    def read(self, name: str) -> list[dict[str, Any]]:
        """The lines of METRICS or TIMINGS that can be read."""
        return (read_rounds if name == METRICS else read_records)(self.path / name).lines

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replaces the summary."""
        replace_file(self.path / SUMMARY, json.dumps(finite(summary), indent=2) + "\n")

    def close(self) -> None:
        """Closes the files and releases the folder."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a full disk, which `append` has reported
                file.close()
        self._files.clear()
