"""A run's folder: its configuration, partition, metrics and summary. Files are replaced whole, or appended to."""

import contextlib
import json
import math
import os
import pathlib
import tempfile
from typing import Any

from ml_collections import ConfigDict

from fedjax_ssl.config import base_config, complete, differences
from fedjax_ssl.errors import BusyError, UserError
from fedjax_ssl.fields import CHANGES_NO_RESULT
from fedjax_ssl.files import replace_file
from fedjax_ssl.methods import section_of

try:
    import fcntl
except ImportError:  # on Windows, where the folder is not locked
    fcntl = None

CONFIG, METRICS, TIMINGS, SUMMARY = "config.json", "metrics.jsonl", "timings.jsonl", "summary.json"
PARTITION, CHECKPOINTS = "partition.npz", "checkpoints"
DATASET, CLASS_COUNTS, SNAPSHOTS = "dataset.json", "class_counts.npz", "snapshots"
REPORT, FIGURES, MODEL_CARD = "report.html", "figures", "MODEL_CARD.md"


def fresh_workdir(parent: pathlib.Path, name: str) -> pathlib.Path:
    """Makes and returns the first of parent/name-001, parent/name-002, ... that does not exist yet."""
    number = 1
    while True:
        workdir = parent / f"{name}-{number:03d}"
        try:
            workdir.mkdir(parents=True)
            return workdir
        except FileExistsError:
            number += 1
        except OSError as error:
            raise UserError(f"cannot make the folder {workdir}: {error.strerror}") from error


def check_folder(path: str | os.PathLike) -> None:
    """Checks that files can be written into a folder, which need not exist; leaves nothing behind.

    Raises:
        UserError: it is no folder, or the operating system lets nobody write there, or not this user.
    """
    if not os.fspath(path):
        raise UserError("the workdir is empty; leave it out for a fresh folder under runs/")
    folder, made = pathlib.Path(path), []
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"the workdir {folder} is not a folder")
        # Made and removed: permissions alone do not say whether a disk is read-only, or a name too long for it.
        for place in (*reversed(folder.parents), folder):
            if not place.exists():
                place.mkdir()
                made.append(place)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, ValueError) as error:  # a ValueError for a zero byte
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot write to the workdir {str(folder)[:200]!r}: {reason}") from error
    finally:
        for place in reversed(made):
            with contextlib.suppress(OSError):  # another process has made something in it meanwhile
                place.rmdir()


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    """A run's configuration as it was saved.

    Raises:
        UserError: it cannot be read, or is none.
    """
    try:
        saved = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {folder / CONFIG}: {' '.join(str(error).split())}") from error
    if not isinstance(saved, dict) or not isinstance(saved.get("method"), str):
        raise UserError(f"cannot read {folder / CONFIG}: it holds no configuration but {str(saved)[:40]!r}")
    for name, value in base_config().items():
        if isinstance(value, ConfigDict) and not isinstance(saved.get(name, {}), dict):
            raise UserError(f"cannot read {folder / CONFIG}: {name} is {str(saved[name])[:40]!r} and no section")
    return saved


class Workdir:
    """The folder of one run. Nothing is written before `begin`."""

    def __init__(self, path: str | os.PathLike | None, config: dict[str, Any]):
        """Checks that this configuration may run in this folder, and locks the folder.

        Args:
            path: need not exist; None takes a fresh folder under runs/ when the run begins.
            config: the complete configuration, as nested dicts.

        Raises:
            UserError: the folder holds a run of another configuration, or something that is no run, or another
                process is using it.
        """
        check_folder("runs" if path is None else path)  # before anything takes long
        self.path = None if path is None else pathlib.Path(path)
        self.config = json.loads(json.dumps(config))  # as it will be read: JSON makes lists of tuples
        self._files: dict[str, Any] = {}
        self.is_begun = path is not None and (self.path / CONFIG).exists()
        if path is None:
            return
        if self.is_begun:
            self._check_same_run()
            self._lock()
        else:
            ours = [name for name in (METRICS, SUMMARY, CHECKPOINTS) if (self.path / name).exists()]
            if ours:
                raise UserError(f"the workdir {self.path} holds {ours[0]} but no {CONFIG}; choose another workdir")

    def _check_same_run(self) -> None:
        found = differences(complete(read_config(self.path)), self.config)
        refused = {name: pair for name, pair in found.items() if name not in CHANGES_NO_RESULT}
        grown = refused.get("num_rounds")
        if grown and grown[0] <= grown[1] and self.config["schedule"] == "constant":
            del refused["num_rounds"]
        if refused:
            listed = "; ".join(f"{name}: {old!r} there, {new!r} here" for name, (old, new) in refused.items())
            raise UserError(f"the workdir {self.path} holds a run of another configuration ({listed})")

    def begin(self, round_number: int) -> None:
        """Writes the configuration, and cuts the records back to `round_number`, where the run resumes.

        Raises:
            UserError: the folder cannot be written to, or (BusyError) another process was quicker.
        """
        if self.path is None:
            self.path = fresh_workdir(pathlib.Path("runs"), section_of(self.config["method"]))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock()
            if not self.is_begun and (self.path / CONFIG).exists():
                raise self._busy()  # another process began a run, and perhaps ended it, since the check
            (self.path / SUMMARY).unlink(missing_ok=True)  # of fewer rounds
            replace_file(self.path / CONFIG, json.dumps(self.config, indent=2) + "\n")
            for name in (METRICS, TIMINGS):
                kept = [line for line in read_lines(self.path / name) if line["round"] <= round_number]
                replace_file(self.path / name, "".join(map(_to_line, kept)))
                self._files[name] = (self.path / name).open("a")
        except OSError as error:
            raise UserError(f"cannot write to the workdir {self.path}: {error.strerror}") from error

    def _lock(self) -> None:
        """Two processes must not train in one folder; the lock is released when the process ends, even if killed."""
        if fcntl is None or "lock" in self._files:
            return
        try:
            self._files["lock"] = (self.path / ".lock").open("w")
        except OSError as error:
            raise UserError(f"cannot write to the workdir {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(self._files["lock"], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise self._busy() from None

    def _busy(self) -> BusyError:
        self.close()
        return BusyError(f"another process is training in the workdir {self.path}")

    def append(self, name: str, lines: list[dict[str, Any]]) -> None:
        """Appends lines to METRICS or TIMINGS, through to the operating system."""
        self._files[name].write("".join(map(_to_line, lines)))
        self._files[name].flush()

    def read(self, name: str) -> list[dict[str, Any]]:
        """The lines of METRICS or TIMINGS."""
        return read_lines(self.path / name)

    def is_summarised(self) -> bool:
        """Whether the summary exists and is that of the last round."""
        path = self.path / SUMMARY
        return path.exists() and is_of_last_round(json.loads(path.read_text()), self.read(METRICS))

    def is_reported(self) -> bool:
        """Whether the report exists and is not older than the summary."""
        report, summary = self.path / REPORT, self.path / SUMMARY
        return report.exists() and report.stat().st_mtime_ns >= summary.stat().st_mtime_ns

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replaces the summary."""
        replace_file(self.path / SUMMARY, json.dumps(_finite(summary), indent=2) + "\n")

    def close(self) -> None:
        """Closes the files and releases the folder."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def is_of_last_round(summary: dict[str, Any] | None, metrics: list[dict[str, Any]]) -> bool:
    """Whether a run's summary exists and is that of the last line of its metrics."""
    return summary is not None and bool(metrics) and summary["rounds"] == metrics[-1]["round"]


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a .jsonl file; a last line that a kill cut short is left out."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _to_line(record: dict[str, Any]) -> str:
    return json.dumps(_finite(record)) + "\n"


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: what could not be measured is null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
