"""checkpoints/ROUND.json: what a checkpoint consists of, and what it was trained with.

Damaged checkpoints and exchanged files of a run are noticed by its checksums.
"""

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data import Dataset, Partition, dataset_facts
from fedjax_ssl.data.content import arrays_of_data, what_differs
from fedjax_ssl.data.npz import read_arrays
from fedjax_ssl.data.partition_file import arrays_of
from fedjax_ssl.records.lines import METRICS, checksum_of_records
from fedjax_ssl.records.sealed import read_dataset, read_sealed, write_sealed
from fedjax_ssl.records.workdir import CHECKPOINTS, CONFIG, DATASET, PARTITION, forbidden_changes, read_config

_TOLERANCE = 1e-5  # relative, of the images' mean and deviation, which another machine may round differently


class TrainedWith(NamedTuple):
    """What determines a run's result, besides the code."""

    config: dict[str, Any]  # nested dicts, as JSON gives them
    dataset: dict[str, Any] | None  # see `fedjax_ssl.data.dataset_facts`; None: not known
    partition: str | None  # the checksum of who owns which rows; None: not known
    secret: str | None = None  # the checksum of a private run's secret; None: not known, or there is none


class Manifest(NamedTuple):
    """The contents of a manifest."""

    round: int  # its state is the one after this round
    files: dict[str, str]  # the checkpoint's files -> SHA-256
    leaves: dict[str, list[int]]  # the paths of the state's arrays -> their shapes
    records: str = ""  # the checksum of the run's records up to the round; '': unknown
    run: TrainedWith | None = None  # what it was trained with; None: unknown


def trained_with(config: dict[str, Any], dataset: Dataset, partition: Partition, secret: bytes = b"") -> TrainedWith:
    """What a run is trained with, from its parts in memory."""
    facts = json.loads(json.dumps(dataset_facts(dataset)))
    told = hashlib.sha256(secret).hexdigest() if secret else None  # which does not reveal it
    return TrainedWith(config, facts, partition_sum(partition, dataset), told)


def partition_sum(partition: Partition, dataset: Dataset) -> str:
    """The checksum of who owns which rows, and of these rows."""
    return _checksum({**arrays_of(partition), **arrays_of_data(dataset)})


def manifest_of(checkpoint: pathlib.Path) -> pathlib.Path:
    """The path of a checkpoint's manifest."""
    return checkpoint.with_name(f"{checkpoint.name}.json")


def write_manifest(checkpoint: pathlib.Path, manifest: Manifest) -> None:
    """Writes the manifest of the checkpoint in a folder."""
    write_sealed(manifest_of(checkpoint), {**manifest._asdict(), "run": manifest.run and manifest.run._asdict()})


def read_manifest(checkpoint: pathlib.Path) -> Manifest:
    """A checkpoint's manifest. Raises OSError if it cannot be read, ValueError if it is not what was written."""
    found = read_sealed(manifest_of(checkpoint))
    return Manifest(**{**found, "run": found["run"] and TrainedWith(**found["run"])})


def check_run(checkpoint: pathlib.Path, then: TrainedWith, now: TrainedWith | None) -> None:
    """Raises a UserError unless a checkpoint, RUN/checkpoints/ROUND, belongs to the files beside it, and to the run.

    `then` is what it was trained with, `now` what the run that resumes from it is trained with; None: none resumes.
    """
    found = exchanged_files(checkpoint.parent.parent, checkpoint, then)
    if now is not None and not found:
        found = _exchanged(checkpoint, then, now, ("the configuration", "the data set", "the partition"))
    if found:
        raise UserError(f"{found[0]}; put the run's own file back: {manifest_of(checkpoint)} says what it was")


def exchanged_files(folder: pathlib.Path, checkpoint: pathlib.Path, then: TrainedWith) -> list[str]:
    """A line for each file of a run's folder that a checkpoint was not trained with.

    Raises a UserError if a file cannot be read.
    """
    try:
        facts = read_dataset(folder)
    except UserError:  # its readers report the damage, and training repairs it
        facts = None
    arrays = read_arrays(str(folder / PARTITION), None) if (folder / PARTITION).exists() else None
    if arrays is not None:
        arrays.pop("earlier_sums", None)  # of other runs' data
    now = TrainedWith(read_config(folder), facts, None if arrays is None else _checksum(arrays))
    return _exchanged(checkpoint, then, now, tuple(str(folder / name) for name in (CONFIG, DATASET, PARTITION)))


def what_is_exchanged(folder: pathlib.Path) -> list[str]:
    """A line for each file of a run's folder, its records included, that does not belong to its newest checkpoint."""
    rounds = [int(path.name) for path in (folder / CHECKPOINTS).glob("[0-9]*") if path.name.isdecimal()]
    if not rounds:
        return []
    checkpoint = folder / CHECKPOINTS / str(max(rounds))
    try:
        manifest = read_manifest(checkpoint)
        found = [] if manifest.run is None else exchanged_files(folder, checkpoint, manifest.run)
        if manifest.records and manifest.records != checksum_of_records(folder, manifest.round):
            found.append(f"{folder / METRICS} is not what was written")
        return found
    except (OSError, ValueError) as error:
        return [f"{checkpoint}: {error}"]


def _exchanged(checkpoint: pathlib.Path, then: TrainedWith, now: TrainedWith, names: tuple[str, ...]) -> list[str]:
    """A line for each thing that a checkpoint was not trained with.

    `names` are what messages call the configuration, the data set and the partition.
    """
    whose, lines = f"is not what the checkpoint {checkpoint} was trained with", []
    if fields := forbidden_changes(then.config, now.config):
        lines.append(f"{names[0]} {whose} ({fields})")
    if then.dataset and now.dataset and (odd := _other_images(then.dataset, now.dataset)):
        lines.append(f"{names[1]} {whose} ({odd})")
    if then.partition and now.partition and then.partition != now.partition:
        lines.append(f"{names[2]} {whose}")
    if then.secret and now.secret and then.secret != now.secret:
        lines.append(f"the run's secret {whose}")
    return lines


def _other_images(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first fact of both in which two data sets differ, in words; '' if none. Their names may differ."""
    for name in sorted(then.keys() & now.keys() - {"name"}):
        old, new = then[name], now[name]
        if name == "content" and (odd := what_differs(old, new)):
            return odd
        may_differ = name in ("mean", "std") and len(old) == len(new)
        if old != new and not (may_differ and np.allclose(old, new, rtol=_TOLERANCE, atol=0)):
            return f"{name}: {old!r:.60} there, {new!r:.60} here"
    return ""


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of integer arrays, independent of compression and integer size; of floats only the shape counts."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].shape} ".encode())
        if np.issubdtype(arrays[name].dtype, np.integer):
            digest.update(arrays[name].astype("<i8").tobytes())
    return digest.hexdigest()
