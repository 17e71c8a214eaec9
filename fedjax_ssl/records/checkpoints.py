"""Checkpoints of a run's state: Orbax's files with their checksums, written atomically."""

import asyncio
import contextlib
import hashlib
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from fedjax_ssl.errors import UserError, first_line
from fedjax_ssl.files import free_name, make_folder, read_whole, remove_folder, sync_folder
from fedjax_ssl.records.manifest import (
    RECORDS_SUM,
    Manifest,
    TrainedWith,
    check_run,
    read_manifest,
    write_manifest,
)

SUMS = "SHA256SUMS"  # checksums of a checkpoint's files, in sha256sum's format
KEPT = 2  # checkpoints of a run; an older one is deleted after a newer one is complete
_STATE = "state"  # the folder with Orbax's files
_EARLIER = "default"  # its name in earlier versions, which wrote no checksums
_DIGITS = 5  # digits of the number before each leaf's name


class Restored(NamedTuple):
    """What was read from a run's checkpoints."""

    state: Any  # the state, or the part of it that was asked for
    round: int  # of the checkpoint that it comes from
    passed_over: list[str]  # for each newer checkpoint that was not used, a line that says why


class Checkpoints:
    """The checkpoints of one run, by round: FOLDER/ROUND/state, and FOLDER/ROUND/SHA256SUMS over all files there.

    A checkpoint is written into a temporary folder, which is renamed when all is on disk. So a folder with a round's
    number was complete once, even if the process was killed. Its checksums show whether it has changed since; its
    manifest shows whether the files beside FOLDER are those that it was trained with.
    """

    def __init__(self, folder: pathlib.Path, run: TrainedWith | None = None):
        """Reads and writes nothing yet.

        Args:
            folder: RUN/checkpoints, need not exist yet.
            run: what the run is trained with: new checkpoints record it, and other runs' checkpoints are refused.
        """
        self._folder = folder.absolute()
        self._run = run

    def rounds(self) -> list[int]:
        """The rounds of all checkpoints, damaged ones included, the earliest first.

        Raises:
            UserError: the path is not a folder.
        """
        if not self._folder.exists():
            return []
        if not self._folder.is_dir():
            raise UserError(f"{self._folder} is not a folder; move it away, or choose another workdir")
        return sorted(int(path.name) for path in self._folder.iterdir() if re.fullmatch("[0-9]+", path.name))

    def save(self, round_number: int, state: Any, records: str = "") -> None:
        """Writes a checkpoint and waits until it is on the disk.

        Args:
            round_number: the state is the one after this round.
            state: a pytree of arrays.
            records: the checksum of the run's records up to this round, for `fits`; '': none.

        Raises:
            OSError: it cannot be written; earlier checkpoints are unharmed.
        """
        if round_number in self.rounds():
            return
        path = self._folder / str(round_number)
        temporary = path.with_suffix(".tmp")
        try:
            make_folder(self._folder)
            self._remove_unfinished()
            temporary.mkdir()
            with _checkpointer(ocp.StandardCheckpointHandler) as checkpointer:
                checkpointer.save(temporary / _STATE, args=ocp.args.StandardSave(_to_dict(state)))
            if records:
                (temporary / RECORDS_SUM).write_text(records)
            write_manifest(temporary, Manifest(round_number, self._run))
            _write_sums(temporary)
            os.rename(temporary, path)
            sync_folder(self._folder)
        except (OSError, ValueError) as error:  # TensorStore raises ValueError for everything, even a full disk
            number = getattr(error, "errno", None)
            raise OSError(number, f"cannot write the checkpoint {path}: {first_line(error)}") from error
        for old in self.rounds()[:-KEPT]:
            doomed = self._folder / f"{old}.tmp"  # so that a kill leaves no incomplete checkpoint
            os.rename(self._folder / str(old), doomed)
            remove_folder(doomed)

    def _remove_unfinished(self) -> None:
        """Removes what a killed process was writing, even with an earlier version."""
        for path in self._folder.glob("[0-9]*"):
            if path.suffix == ".tmp" or ".orbax-checkpoint-tmp" in path.name:
                remove_folder(path)

    def fits(self, round_number: int, records: str) -> bool:
        """Whether a checkpoint was saved with records of this checksum.

        Also True for a checkpoint without such a checksum, as in earlier versions, and for a damaged one, which
        `restore` reports.
        """
        path = self._folder / str(round_number)
        try:
            if not (path / RECORDS_SUM).exists() or read_whole(path / RECORDS_SUM) == records.encode():
                return True
            _check_sums(path)
        except (OSError, _DamagedError):
            return True
        return False

    def set_aside(self, after: int) -> None:
        """Renames the checkpoints of later rounds, ROUND to ROUND.set_aside, so that the run can go on from `after`."""
        for number in self.rounds():
            if number > after:
                os.rename(self._folder / str(number), free_name(self._folder / f"{number}.set_aside"))

    def restore(self, like: Any, reached: int | None = None) -> Restored:
        """The state of the newest undamaged checkpoint. Nothing is renamed or deleted.

        Args:
            like: a pytree of the state's structure, with arrays or shapes for leaves.
            reached: the last round of the records; later checkpoints are not used. None: any.

        Raises:
            UserError: no checkpoint can be used, or its structure or shapes differ.
        """
        wanted = _to_dict(like)

        def read(path: pathlib.Path, saved: dict[str, Any]) -> dict[str, Any]:
            names = {_of_today(name): name for name in saved}
            _compare({today: saved[name] for today, name in names.items()}, wanted, path)
            found = _read(path, {names[name]: leaf for name, leaf in wanted.items()})
            return {name: found[names[name]] for name in wanted}

        found, number, passed_over = self._first_whole(read, reached=reached)
        return Restored(jax.tree.unflatten(jax.tree.structure(like), list(found.values())), number, passed_over)

    def shapes(self, round_number: int | None = None, reached: int | None = None) -> dict[str, tuple[int, ...]]:
        """The shapes of a checkpoint's leaves, by their paths in the state.

        Args:
            round_number: the checkpoint's; None: the newest undamaged one.
            reached: see `restore`.

        Raises:
            UserError: there is no such checkpoint, or it cannot be used.
        """

        def read(path: pathlib.Path, saved: dict[str, Any]) -> dict[str, Any]:
            return {_of_today(name)[_DIGITS:]: tuple(leaf.shape) for name, leaf in saved.items()}

        return self._first_whole(read, reached, round_number)[0]

    def restore_part(self, like: Any, round_number: int | None = None) -> Restored:
        """The named entries of a checkpoint, without reading the others.

        Args:
            like: a pytree with arrays or shapes for leaves, each at its path in the state: `State(None, model)` for the
                model.
            round_number: the checkpoint's; None: the newest undamaged one.

        Raises:
            UserError: there is no such checkpoint, or it cannot be used, or has no such entries of these shapes.
        """
        leaves, structure = jax.tree.flatten_with_path(like)
        wanted = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}

        def read(path: pathlib.Path, saved: dict[str, Any]) -> dict[str, Any]:
            names = {_of_today(name)[_DIGITS:]: name for name in saved}
            for name, leaf in wanted.items():
                if name not in names:
                    raise UserError(f"the checkpoint {path} does not fit: it has no {name}")
                shape = tuple(saved[names[name]].shape)
                if shape != tuple(leaf.shape):
                    raise UserError(
                        f"the checkpoint {path} does not fit: {name} has shape {shape}, not {tuple(leaf.shape)}"
                    )
            found = _read(path, {names[name]: leaf for name, leaf in wanted.items()})
            return {name: found[names[name]] for name in wanted}

        found, number, passed_over = self._first_whole(read, only=round_number)
        return Restored(jax.tree.unflatten(structure, list(found.values())), number, passed_over)

    def _first_whole(
        self,
        read: Callable[[pathlib.Path, dict[str, Any]], dict[str, Any]],
        reached: int | None = None,
        only: int | None = None,
    ) -> tuple[dict[str, Any], int, list[str]]:
        """The result of `read` for the newest undamaged checkpoint, its round, and why newer ones were passed over.

        Args:
            read: (a checkpoint's folder, its leaves' metadata) -> leaves or their shapes, by name.
            reached: later rounds are passed over; None: any.
            only: the only round to try; None: any.
        """
        rounds, passed_over = self.rounds(), []
        if only is not None:
            if only not in rounds:
                raise UserError(f"there is no checkpoint {self._folder / str(only)}")
            rounds = [only]
        if not rounds:
            raise UserError(f"there is no checkpoint in {self._folder}")
        for number in reversed(rounds):
            path = self._folder / str(number)
            if reached is not None and number > reached:
                passed_over.append(f"the checkpoint {path} is later than the records, which reach round {reached}")
                continue
            try:
                _check_sums(path)
                self._check_manifest(path)
                saved = _metadata(path)
                return read(path, saved), number, passed_over
            except _DamagedError as damage:
                passed_over.append(f"the checkpoint {path} is damaged: {damage}")
        raise UserError(
            f"no checkpoint can be used ({'; '.join(passed_over)}); put files of a copy back, or train in another "
            "workdir"
        )

    def _check_manifest(self, path: pathlib.Path) -> None:
        """Raises _DamagedError for a checkpoint of another round, UserError for a checkpoint of another run."""
        try:
            manifest = read_manifest(path)
        except (OSError, ValueError) as error:
            raise _DamagedError(first_line(error)) from error
        if manifest is not None and manifest.round != int(path.name):
            raise _DamagedError(f"its state is that of round {manifest.round}")
        if manifest is not None and manifest.run is not None:
            check_run(path, manifest.run, self._run)


class _DamagedError(Exception):
    """A checkpoint differs from what was written; the message says how."""


def _checkpointer(kind: Callable[..., Any]) -> ocp.Checkpointer:
    """Orbax's checkpointer with a handler of this class, for this process alone.

    If several processes train together, each has the whole state and only the one with the workdir saves it. So
    Orbax must not wait for the others.
    """
    options = ocp.options.MultiprocessingOptions()
    if jax.distributed.is_initialized():
        here = jax.process_index()
        options = ocp.options.MultiprocessingOptions(here, active_processes={here}, barrier_sync_key_prefix="first")
    return ocp.Checkpointer(kind(multiprocessing_options=options), multiprocessing_options=options)


def _write_sums(folder: pathlib.Path) -> None:
    """Syncs all files of a folder to the disk, then writes their checksums and syncs these, too."""
    lines = []
    for file in _files(folder):
        with file.open("r+b") as opened:  # some systems sync only files that are open for writing
            os.fsync(opened.fileno())
            lines.append(f"{hashlib.file_digest(opened, 'sha256').hexdigest()}  {file.relative_to(folder).as_posix()}")
    with (folder / SUMS).open("w") as sums:
        sums.write("".join(f"{line}\n" for line in lines))
        sums.flush()
        os.fsync(sums.fileno())
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(path)


def _check_sums(folder: pathlib.Path) -> None:
    """Raises _DamagedError unless the folder holds exactly the files of its checksums, unchanged.

    A checkpoint of an earlier version has no checksums and cannot be checked.
    """
    try:
        if not (folder / SUMS).exists():
            if (folder / _EARLIER).is_dir():
                return
            raise _DamagedError(f"there is no {SUMS}")
        lines = read_whole(folder / SUMS).decode().splitlines()
        listed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
        present = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
        for name in sorted(listed.keys() | present.keys()):
            if name not in present:
                raise _DamagedError(f"{name} is missing")
            if name not in listed:
                raise _DamagedError(f"{name} is not in {SUMS}")
            if not present[name].is_file():  # such as a pipe, which would block
                raise _DamagedError(f"{name} is not a file")
            with present[name].open("rb") as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() != listed[name]:
                    raise _DamagedError(f"{name} is not what was written")
        if not present:
            raise _DamagedError("it is empty")
    except (OSError, UnicodeDecodeError) as error:
        raise _DamagedError(first_line(error)) from error


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    """All files of a folder, without the checksums and without hidden files, which file managers leave."""
    found = [path for path in folder.rglob("*") if not path.is_dir() and not path.name.startswith(".")]
    return sorted(path for path in found if path != folder / SUMS)


def _item(folder: pathlib.Path) -> pathlib.Path:
    """Orbax's folder in a checkpoint."""
    return folder / (_STATE if (folder / SUMS).exists() else _EARLIER)


def _metadata(folder: pathlib.Path) -> dict[str, Any]:
    """Leaf name -> metadata with its shape, for each leaf of a checkpoint."""
    try:
        with _checkpointer(ocp.PyTreeCheckpointHandler) as checkpointer:
            return dict(checkpointer.metadata(_item(folder)).item_metadata.tree)
    except Exception as error:  # The errors of Orbax and TensorStore have no common base.
        raise _DamagedError(first_line(error)) from error


def _read(folder: pathlib.Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Some leaves of a checkpoint, by their names in it."""
    item = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in wanted.items()}
    # To the host, whichever devices they were saved from.
    to_host = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in wanted}
    arguments = ocp.args.PyTreeRestore(item=item, restore_args=to_host, partial_restore=True)
    try:
        with _checkpointer(ocp.PyTreeCheckpointHandler) as checkpointer, _late_reads_are_ignored():
            return checkpointer.restore(_item(folder), args=arguments)
    except Exception as error:  # As above.
        raise _DamagedError(first_line(error)) from error


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that ignores callbacks after it was closed."""

    def call_soon_threadsafe(self, callback, *args, context=None):  # type: ignore[override]  # typed by its callback
        return None if self.is_closed() else super().call_soon_threadsafe(callback, *args, context=context)


@contextlib.contextmanager
def _late_reads_are_ignored() -> Iterator[None]:
    """Suppresses tracebacks of TensorStore after a failed read.

    Orbax reads all leaves at once, and closes its event loop at the first that cannot be read. TensorStore would then
    print a traceback for each other leaf when its read ends.
    """
    original, asyncio.new_event_loop = asyncio.new_event_loop, _Loop
    try:
        yield
    finally:
        asyncio.new_event_loop = original


def _to_dict(state: Any) -> dict[str, Any]:
    """A flat dict from each leaf's path to the leaf; the paths name the fields of NamedTuples."""
    leaves, _ = jax.tree.flatten_with_path(state)
    # Zero-padded numbers keep the order of the leaves when a dict is sorted.
    return {f"{number:0{_DIGITS}d}{jax.tree_util.keystr(path)}": leaf for number, (path, leaf) in enumerate(leaves)}


def _of_today(name: str) -> str:
    """Converts a leaf's name in a checkpoint to the name that this version uses.

    Earlier versions stored a model's two parts separately, and had another name for an upload's metadata.
    """
    name = re.sub(rf"^(\d{{{_DIGITS}}})\.(params|batch_stats)\b", r"\1.model.\2", name)
    return name.replace(".told[", ".metadata[")


def _compare(saved: dict[str, Any], wanted: dict[str, Any], path: pathlib.Path) -> None:
    """Raises UserError with the first leaf in which a checkpoint differs from the wanted state."""
    for name in sorted(saved.keys() | wanted.keys()):
        if name not in saved or name not in wanted:
            reason = f"{name[_DIGITS:]} is {'only in the checkpoint' if name in saved else 'not in the checkpoint'}"
        elif tuple(saved[name].shape) != tuple(wanted[name].shape):
            shapes = tuple(saved[name].shape), tuple(wanted[name].shape)
            reason = f"{name[_DIGITS:]} has shape {shapes[0]}, not {shapes[1]}"
        else:
            continue
        raise UserError(f"the checkpoint {path} does not fit this configuration in this version: {reason}")
