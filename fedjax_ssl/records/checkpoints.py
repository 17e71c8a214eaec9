"""Checkpoints of a run's state: Orbax writes and prunes them; a manifest beside each has its checksums."""

import hashlib
import os
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from fedjax_ssl.base.errors import UserError, first_line
from fedjax_ssl.base.files import free_name
from fedjax_ssl.records.manifest import Manifest, TrainedWith, check_run, manifest_of, read_manifest, write_manifest

KEPT = 2  # checkpoints of a run; an older one is deleted after a newer one is complete


class Restored(NamedTuple):
    """What was read from a run's checkpoints."""

    state: Any  # the state, or the part of it that was asked for
    round: int  # of the checkpoint that it comes from
    passed_over: list[str]  # for each newer checkpoint that was not used, a line that says why


class Checkpoints:
    """The checkpoints of one run, by round: FOLDER/ROUND/ of Orbax's CheckpointManager, and FOLDER/ROUND.json.

    Orbax writes into a temporary folder, which it renames. So a folder with a round's number was complete once, even
    if the process was killed. The manifest shows whether its files have changed since, and whether the files beside
    FOLDER are those that it was trained with.
    """

    def __init__(self, folder: pathlib.Path, run: TrainedWith | None = None):
        """Reads and writes nothing yet. New checkpoints record `run`, and other runs' checkpoints are refused."""
        self._folder = folder.absolute()
        self._run = run

    def rounds(self) -> list[int]:
        """The rounds of all checkpoints, damaged ones included, the earliest first."""
        return sorted(int(path.name) for path in self._folder.glob("[0-9]*") if path.name.isdecimal())

    def save(self, round_number: int, state: Any, records: str = "") -> None:
        """Writes a checkpoint; `records` is the checksum of the run's records up to this round, for `fits`; '': none.

        Raises OSError if it cannot be written; earlier checkpoints are unharmed.
        """
        if round_number in self.rounds():
            return
        path, leaves = self._folder / str(round_number), _by_path(state)
        try:
            self._folder.mkdir(exist_ok=True)
            with _manager(self._folder, writes=True) as manager:
                manager.save(round_number, args=ocp.args.PyTreeSave(leaves), force=True)
            shapes = {name: list(leaf.shape) for name, leaf in leaves.items()}
            write_manifest(path, Manifest(round_number, _sums(path), shapes, records, self._run))
            kept = {manifest_of(self._folder / str(number)) for number in self.rounds()}
            for manifest in set(self._folder.glob("[0-9]*.json")) - kept:
                manifest.unlink()
        except (OSError, ValueError) as error:  # TensorStore raises ValueError for everything, even a full disk
            number = getattr(error, "errno", None)
            raise OSError(number, f"cannot write the checkpoint {path}: {first_line(error)}") from error

    def fits(self, round_number: int, records: str) -> bool:
        """Whether a checkpoint was saved with records of this checksum, or with none.

        Also True for one whose manifest is damaged, which `restore` reports.
        """
        try:
            return read_manifest(self._folder / str(round_number)).records in ("", records)
        except (OSError, ValueError):
            return True

    def set_aside(self, after: int) -> None:
        """Renames the checkpoints of later rounds, ROUND to ROUND.set_aside, so that the run can go on from `after`."""
        for number in self.rounds():
            if number > after:
                os.rename(self._folder / str(number), free_name(self._folder / f"{number}.set_aside"))

    def restore(
        self, like: Any, reached: int | None = None, round_number: int | None = None, part: bool = False
    ) -> Restored:
        """The state of the newest undamaged checkpoint. Nothing is renamed or deleted.

        Args:
            like: a pytree of the state's structure, with arrays or shapes for leaves.
            reached: the last round of the records; later checkpoints are not used. None: any.
            round_number: the checkpoint's; None: the newest undamaged one.
            part: `like` has only some of the state's entries, each at its path in the state, as in `State(None, model)`
                for the model; the others are not read.

        Raises:
            UserError: no checkpoint can be used, or its structure or shapes differ.
        """
        manifest, passed_over = self._first_whole(reached, round_number)
        path, wanted = self._folder / str(manifest.round), _by_path(like)
        saved = {name: shape for name, shape in manifest.leaves.items() if not part or name in wanted}
        for name in sorted(saved.keys() | wanted.keys()):
            there = tuple(saved[name]) if name in saved else "missing"
            here = tuple(wanted[name].shape) if name in wanted else "unknown"
            if there != here:
                raise UserError(
                    f"the checkpoint {path} does not fit this configuration in this version: {name} is {there} there, "
                    f"and {here} here"
                )
        item = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in wanted.items()}
        # To the host, whichever devices they were saved from.
        to_host = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in wanted}
        with _manager(self._folder) as manager:
            arguments = ocp.args.PyTreeRestore(item=item, restore_args=to_host, partial_restore=True)
            found = manager.restore(manifest.round, args=arguments)
        leaves = [found[name] for name in wanted]
        return Restored(jax.tree.unflatten(jax.tree.structure(like), leaves), manifest.round, passed_over)

    def shapes(self, round_number: int | None = None, reached: int | None = None) -> dict[str, tuple[int, ...]]:
        """The shapes of a checkpoint's leaves, by their paths in the state. Raises a UserError if it cannot be used."""
        manifest, _ = self._first_whole(reached, round_number)
        return {name: tuple(shape) for name, shape in manifest.leaves.items()}

    def _first_whole(self, reached: int | None, only: int | None) -> tuple[Manifest, list[str]]:
        """The manifest of the newest undamaged checkpoint, or of `only`; and why newer ones were passed over."""
        rounds, passed_over = [number for number in self.rounds() if only in (None, number)], []
        for number in reversed(rounds):
            path = self._folder / str(number)
            if reached is not None and number > reached:
                passed_over.append(f"the checkpoint {path} is later than the records, which reach round {reached}")
                continue
            try:
                manifest = read_manifest(path)
                damage = _what_is_damaged(path, manifest)
            except (OSError, ValueError) as error:
                damage = f"{manifest_of(path)}: {first_line(error)}"
            if damage:
                passed_over.append(f"the checkpoint {path} is damaged: {damage}")
                continue
            if manifest.run is not None:
                check_run(path, manifest.run, self._run)
            return manifest, passed_over
        why = f"there is no checkpoint {'' if only is None else f'{only} '}in {self._folder}"
        if passed_over:
            why = f"no checkpoint can be used ({'; '.join(passed_over)})"
        raise UserError(f"{why}; put files of a copy back, or train in another workdir")


def _manager(folder: pathlib.Path, writes: bool = False) -> ocp.CheckpointManager:
    """Orbax's manager of a run's checkpoints, for this process alone.

    If several processes train together, each has the whole state and only the one with the workdir saves it. So
    Orbax must not wait for the others.
    """
    processes = ocp.options.MultiprocessingOptions()
    if jax.distributed.is_initialized():
        here = jax.process_index()
        processes = ocp.options.MultiprocessingOptions(here, active_processes={here}, barrier_sync_key_prefix="first")
    return ocp.CheckpointManager(
        folder,
        options=ocp.CheckpointManagerOptions(
            max_to_keep=KEPT if writes else None,
            create=False,
            cleanup_tmp_directories=writes,
            enable_async_checkpointing=False,
            multiprocessing_options=processes,
        ),
    )


def _sums(checkpoint: pathlib.Path) -> dict[str, str]:
    """The checksum of each file of a checkpoint, without hidden files, which file managers leave."""
    files = [path for path in sorted(checkpoint.rglob("*")) if not path.is_dir() and not path.name.startswith(".")]
    return {path.relative_to(checkpoint).as_posix(): _sum(path) for path in files}


def _sum(path: pathlib.Path) -> str:
    if not path.is_file():  # such as a pipe, which would block
        return "not a file"
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _what_is_damaged(checkpoint: pathlib.Path, manifest: Manifest) -> str:
    """How a checkpoint differs from what was written, in words; '' if it does not."""
    if manifest.round != int(checkpoint.name):
        return f"its state is that of round {manifest.round}"
    found = _sums(checkpoint)
    odd = sorted(name for name in found.keys() | manifest.files.keys() if found.get(name) != manifest.files.get(name))
    return "" if not odd else f"{odd[0]} is {'not what was written' if odd[0] in found else 'missing'}"


def _by_path(tree: Any) -> dict[str, Any]:
    """A flat dict from each leaf's path to the leaf; the paths name the fields of NamedTuples."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
