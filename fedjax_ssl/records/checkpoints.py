"""Checkpoints of a run's state with Orbax, written whole or not at all."""

import pathlib
import re
from typing import Any

import jax
import orbax.checkpoint as ocp

from fedjax_ssl.errors import UserError

_DIGITS = 5  # of the number before each leaf's name


class Checkpoints:
    """The checkpoints of one run, by round.

    Orbax writes into a temporary folder and renames it when all is on disk, so the newest folder with a round's
    number is complete, even if the process is killed.
    """

    def __init__(self, folder: pathlib.Path, keep: int = 2):
        """Opens the folder without writing to it.

        Args:
            folder: need not exist yet.
            keep: how many checkpoints remain; an older one is deleted after a newer one is complete.
        """
        self._folder = folder.absolute()
        self._keep = keep
        self._manager: ocp.CheckpointManager | None = None

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self._keep, create=False, enable_async_checkpointing=False, cleanup_tmp_directories=True
            )
            handler = ocp.StandardCheckpointHandler()
            self._manager = ocp.CheckpointManager(self._folder, options=options, item_handlers=handler)
        return self._manager

    def latest_round(self) -> int | None:
        """The round of the newest checkpoint; None without one."""
        return self._open().latest_step() if self._folder.exists() else None

    def save(self, round_number: int, state: Any) -> None:
        """Writes a checkpoint and waits until it is complete."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if round_number not in self._open().all_steps():
            self._open().save(round_number, args=ocp.args.StandardSave(_to_dict(state)), force=True)
            self._open().wait_until_finished()

    def restore(self, like: Any) -> Any:
        """The newest checkpoint.

        Args:
            like: a pytree of the state's structure, with arrays or shapes for leaves.

        Raises:
            UserError: the checkpoint is of another structure, or of other shapes.
        """
        step = self._open().latest_step()
        try:
            saved = {_of_today(name): name for name in dict(self._open().item_metadata(step))}
            wanted = _to_dict(like)
            _compare({name: self._open().item_metadata(step)[old] for name, old in saved.items()}, wanted)
            item = {saved[name]: leaf for name, leaf in wanted.items()}
            restored = self._open().restore(step, args=ocp.args.StandardRestore(item))
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"the checkpoint {self._folder / str(step)} does not fit this configuration: {reason}"
            ) from error
        return jax.tree.unflatten(jax.tree.structure(like), [restored[saved[name]] for name in wanted])

    def shapes(self, round_number: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a checkpoint's leaves, by their paths in the state.

        Raises:
            UserError: there is no such checkpoint.
        """
        with self._open_parts(round_number) as manager:
            found = dict(manager.item_metadata(round_number))
        return {_of_today(name)[_DIGITS:]: tuple(leaf.shape) for name, leaf in found.items()}

    def restore_part(self, like: Any, round_number: int | None = None) -> Any:
        """The named entries of a checkpoint, without reading the others.

        Args:
            like: a pytree with arrays or shapes for leaves, each at the path that it has in the state: for its model
                `State(None, model)`.
            round_number: the checkpoint's; None: the newest.

        Raises:
            UserError: there is no such checkpoint, or it has no such entries of these shapes.
        """
        step = self.latest_round() if round_number is None else round_number
        if step is None:
            raise UserError(f"there is no checkpoint in {self._folder}")
        wanted, structure = jax.tree.flatten_with_path(like)
        wanted = {jax.tree_util.keystr(path): leaf for path, leaf in wanted}
        with self._open_parts(step) as manager:
            saved = {_of_today(name)[_DIGITS:]: name for name in dict(manager.item_metadata(step))}
            missing = [name for name in wanted if name not in saved]
            if missing:
                raise UserError(f"the checkpoint {self._folder / str(step)} does not fit: it has no {missing[0]}")
            item = {saved[name]: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in wanted.items()}
            found = manager.restore(step, args=ocp.args.PyTreeRestore(item=item, partial_restore=True))
        for name, leaf in wanted.items():
            shape = tuple(found[saved[name]].shape)
            if shape != tuple(leaf.shape):
                raise UserError(
                    f"the checkpoint {self._folder / str(step)} does not fit: {name} has shape {shape}, not "
                    f"{tuple(leaf.shape)}"
                )
        return jax.tree.unflatten(structure, [found[saved[name]] for name in wanted])

    def _open_parts(self, step: int) -> ocp.CheckpointManager:
        """A second manager, for parts of a checkpoint: the first one's handler restores whole states only."""
        if not (self._folder / str(step)).is_dir():
            raise UserError(f"there is no checkpoint {self._folder / str(step)}")
        options = ocp.CheckpointManagerOptions(create=False)
        return ocp.CheckpointManager(self._folder, options=options, item_handlers=ocp.PyTreeCheckpointHandler())

    def close(self) -> None:
        """Releases the folder."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None


def _to_dict(state: Any) -> dict[str, Any]:
    """A flat dict from each leaf's path to the leaf: NamedTuples and empty entries keep their place by name."""
    leaves, _ = jax.tree.flatten_with_path(state)
    # Zero-padded numbers keep the order of the leaves when a dict is sorted.
    return {f"{number:0{_DIGITS}d}{jax.tree_util.keystr(path)}": leaf for number, (path, leaf) in enumerate(leaves)}


def _of_today(name: str) -> str:
    """A leaf's name in a checkpoint, as the library names it now; earlier versions had a model's two parts apart."""
    return re.sub(rf"^(\d{{{_DIGITS}}})\.(params|batch_stats)\b", r"\1.model.\2", name)


def _compare(saved: Any, wanted: dict[str, Any]) -> None:
    """Raises ValueError with the first leaf in which a checkpoint differs from what is wanted."""
    saved = dict(saved)
    for name in sorted(saved.keys() | wanted.keys()):
        if name not in saved or name not in wanted:
            where = "only in the checkpoint" if name in saved else "not in the checkpoint"
            raise ValueError(f"{name[_DIGITS:]} is {where}")
        if tuple(saved[name].shape) != tuple(wanted[name].shape):
            raise ValueError(f"{name[_DIGITS:]} has shape {tuple(saved[name].shape)}, not {tuple(wanted[name].shape)}")
