"""The model of another run from which a run starts: `config.init_from`."""

import os
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_ssl.config import complete, labels_revealed
from fedjax_ssl.data import Partition, dataset_facts, load_partition
from fedjax_ssl.engine.interface import State
from fedjax_ssl.errors import UserError
from fedjax_ssl.files import expanded, read_json
from fedjax_ssl.kinds import IMAGE, kind_name, kind_of
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.dataset import read_dataset
from fedjax_ssl.records.workdir import CHECKPOINTS, CONFIG, DATASET, PARTITION
from fedjax_ssl.run import hosts
from fedjax_ssl.run.experiment import Experiment
from fedjax_ssl.run.observe.log import warn


class WarmStart(NamedTuple):
    """What a run starts from."""

    model: Model  # the parts that both runs have, with their normalisation statistics, on the host
    facts: dict[str, Any]  # for init_from.json and the summary: the other run's folder, method and round, and the parts


def find_warm_start(experiment: Experiment, root: str | os.PathLike[str] | None = None) -> WarmStart | None:
    """The parts of the model that `init_from` names; None if the field is empty.

    Args:
        experiment: the run that begins.
        root: the folder that is searched first for a relative path, such as a sweep's.

    Raises:
        UserError: there is no such checkpoint; its inputs, normalisation or arrays differ from this run's; or it was
            trained on labels that are hidden in this run.
    """
    config = experiment.problem.config
    if not config.init_from:
        return None
    folder, number = _find_run(config.init_from, config.seed, root)
    where = f"init_from={config.init_from}: "
    try:
        theirs, facts = complete(read_json(folder / CONFIG)), read_dataset(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{where}cannot read the run in {folder}: {' '.join(str(error).split())}") from error
    if not facts:
        raise UserError(f"{where}the run in {folder} has no {DATASET}")
    _check_images(where, facts, dataset_facts(experiment.dataset))
    for field in ("standardise", "normalisation"):
        old, new = theirs["data"][field], config.data[field]
        if old != new:
            raise UserError(f"{where}its inputs had data.{field}={old!r}, but this run's have {new!r}")
    _check_normalisation(where, theirs["model"]["normalisation"], config.model.normalisation)
    _check_labels(where, folder, theirs, facts, experiment)
    checkpoints = Checkpoints(folder / CHECKPOINTS)
    if not checkpoints.rounds():
        raise UserError(f"{where}the run in {folder} has no checkpoint yet")
    try:
        like = _shared_parts(where, experiment.state_shape.model, checkpoints.shapes(number))
        restored = checkpoints.restore_part(State(None, like), number)
    except UserError as error:
        raise error if str(error).startswith(where) else UserError(f"{where}{error}") from error
    for line in restored.passed_over:
        warn(f"{where}{line}; the model is that of round {restored.round}")
    model = jax.device_get(restored.state.model)
    told = {"run": str(folder.resolve()), "method": theirs["method"], "round": restored.round}
    return WarmStart(model, {**told, "parts": list(model.params)})


def share_warm_start(experiment: Experiment, root: str | os.PathLike[str] | None = None) -> WarmStart | None:
    """Like `find_warm_start`, on all hosts that train together; only the first host reads files."""
    found = find_warm_start(experiment, root) if hosts.is_first() else None
    if hosts.count() == 1:
        return found
    facts = hosts.from_first(lambda: found and found.facts)
    if facts is None:
        return None
    shapes = experiment.state_shape.model
    like = Model(*({part: kind[part] for part in facts["parts"] if part in kind} for kind in shapes))
    return WarmStart(hosts.tree_from_first(lambda: found.model, like), facts)


def _find_run(text: str, seed: int, root: str | os.PathLike[str] | None) -> tuple[pathlib.Path, int | None]:
    """The folder of a run and the round of its checkpoint; None: the newest.

    Args:
        text: a run's folder; a folder of several seeds' runs, in which the run of `seed` is used; or
            RUN/checkpoints/ROUND.
        seed: of the run that begins.
        root: see `find_warm_start`.
    """
    path = expanded(text)
    if root is not None and (pathlib.Path(root) / path).exists():
        path = pathlib.Path(root) / path
    if not path.is_dir():
        raise UserError(f"init_from={text}: there is no folder {path}")
    if (path / CONFIG).exists():
        return path, None
    if (path / f"seed_{seed}" / CONFIG).exists():
        return path / f"seed_{seed}", None
    if path.name.isdigit() and path.parent.name == CHECKPOINTS and (path.parent.parent / CONFIG).exists():
        return path.parent.parent, int(path.name)
    seeds = f" and no run of seed {seed}" if list(path.glob(f"seed_*/{CONFIG}")) else ""
    raise UserError(f"init_from={text}: {path} holds no run{seeds}; name a run's folder, or RUN/checkpoints/ROUND")


def _check_images(where: str, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raises UserError for inputs of another shape, which a network without a fixed input size would accept."""
    old, new = (
        f"{kind_of(facts).noun} of {'x'.join(map(str, kind_of(facts).inputs(facts).shape))}" for facts in (theirs, ours)
    )
    if old != new:
        raise UserError(f"{where}its model is for {old}, but the data of this run are {new}")
    for name in ("columns", "categories", "vocabulary"):
        if theirs.get(name) != ours.get(name):
            raise UserError(f"{where}its model's data have another {name} than those of this run")
    if "encoder_side" in theirs and theirs["encoder_side"] != ours.get("encoder_side"):
        raise UserError(f"{where}its encoder's images had another side (encoder.side) than those of this run")
    # Runs with adapters of earlier versions do not say which weights they had.
    if theirs.get("weights", ours.get("weights") if kind_name(ours) == IMAGE else None) != ours.get("weights"):
        raise UserError(f"{where}its model was trained on an encoder with other weights than this run's")


def _check_normalisation(where: str, old: str, new: str) -> None:
    """Raises UserError if the same arrays would make a different network."""
    stored = ("running", "static")  # both use batch statistics in training, and 'static' computes its statistics anew
    if old != new and not (old in stored and new in stored):
        raise UserError(f"{where}its model.normalisation is {old!r}, but this run's is {new!r}")


def _check_labels(
    where: str, folder: pathlib.Path, theirs: dict[str, Any], facts: dict[str, Any], experiment: Experiment
) -> None:
    """Raises UserError if the other run was trained on labels that are hidden in this one."""
    config, ours = experiment.problem.config, dataset_facts(experiment.dataset)
    if labels_revealed(config) or facts.get("name") != ours["name"]:
        return
    # Images of a second, unknown data set follow the others, and have no label.
    number, same_unknown = facts.get("num_train"), theirs["data"]["unknown_source"] == config.data.unknown_source
    if number is None or (number != ours["num_train"] and same_unknown):
        warn(f"{where}its data of the same name have {number or '?'} training examples, those of this run "
             f"{ours['num_train']}; whether it saw labels that are hidden in this run is not known")  # fmt: skip
        return
    if labels_revealed(theirs):
        raise UserError(f"{where}that run saw the clients' labels (data.reveal_labels), which are hidden in this one")
    seen = _labelled(load_partition(folder / PARTITION, number, theirs["num_clients"]))
    hidden = np.setdiff1d(seen, _labelled(experiment.partition))
    if len(hidden):
        raise UserError(
            f"{where}that run was trained on {len(hidden):,} labels that are hidden in this one: its seed ("
            f"{theirs['seed']}, here {config.seed}) or its fields of config.data are others"
        )


def _labelled(partition: Partition) -> np.ndarray:
    return np.concatenate([partition.server_index, partition.labelled_rows])


def _shared_parts(where: str, model: Model, saved: dict[str, tuple[int, ...]]) -> Model:
    """The shapes of the parts that a model and a checkpoint both have.

    Args:
        where: begins the message.
        model: shapes.
        saved: shapes of the checkpoint's leaves, by their path in the state.

    Raises:
        UserError: the checkpoint has no backbone, or a part has other arrays.
    """

    def names(tree: Any) -> dict[str, tuple[int, ...]]:
        leaves, _ = jax.tree.flatten_with_path(State(None, tree))
        return {jax.tree_util.keystr(path): tuple(leaf.shape) for path, leaf in leaves}

    def of_part(part: str, named: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        prefixes = tuple(f".model.{kind}[{part!r}]" for kind in Model._fields)
        return {name: shape for name, shape in named.items() if name.startswith(prefixes)}

    parts, ours = [part for part in model.params if of_part(part, saved)], names(model)
    # A classifier on its own ('linear') has a backbone without arrays.
    if not parts or (jax.tree.leaves(model.params["backbone"]) and "backbone" not in parts):
        raise UserError(f"{where}its checkpoint has no backbone")
    for part in parts:
        theirs, mine = of_part(part, saved), of_part(part, ours)
        for name in sorted(theirs.keys() | mine.keys()):
            if theirs.get(name) != mine.get(name):
                old, new = (shapes.get(name, "absent") for shapes in (theirs, mine))
                raise UserError(f"{where}its model does not fit this run's: {name} is {old} there, and {new} here")
    return Model(*({part: kind[part] for part in parts if part in kind} for kind in model))
