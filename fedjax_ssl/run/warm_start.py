"""The model of another run from which a run starts: `config.init_from`."""

import json
import os
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.files import expanded
from fedjax_ssl.data import Partition, dataset_facts, load_partition
from fedjax_ssl.engine.interface import State
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.dataset import read_dataset
from fedjax_ssl.records.words import labels_revealed
from fedjax_ssl.records.workdir import CHECKPOINTS, CONFIG, PARTITION, read_config
from fedjax_ssl.run import hosts
from fedjax_ssl.run.experiment import Experiment
from fedjax_ssl.run.observe.log import warn

# Facts of a data set on which the network depends.
_OF_INPUTS = ("kind", "image_shape", "shape", "columns", "categories", "tokenizer", "encoder_side", "weights")


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
    where = f"init_from={config.init_from}: "
    try:
        folder, number = _find_run(config.init_from, config.seed, root)
        checkpoints, ours = Checkpoints(folder / CHECKPOINTS), experiment.state_shape.model
        saved = checkpoints.shapes(number)  # also checks that the other files are those that it was trained with
        theirs, facts = read_config(folder), read_dataset(folder)
        other = _what_differs(theirs, config, facts, dataset_facts(experiment.dataset))
        if refused := other or _labels_seen(where, folder, theirs, facts, experiment):
            raise UserError(refused)
        parts = [part for part in ours.params if any(name.startswith(f".model.params[{part!r}]") for name in saved)]
        if not parts or (jax.tree.leaves(ours.params["backbone"]) and "backbone" not in parts):
            raise UserError("its checkpoint has no backbone")
        restored = checkpoints.restore(State(None, _parts_of(ours, parts)), round_number=number, part=True)
    except UserError as error:
        raise UserError(f"{where}{error}") from error
    for line in restored.passed_over:
        warn(f"{where}{line}; the model is that of round {restored.round}")
    told = {"run": str(folder.resolve()), "method": theirs["method"], "round": restored.round, "parts": parts}
    return WarmStart(jax.device_get(restored.state.model), told)


def _parts_of(model: Model, parts: list[str]) -> Model:
    """Some parts of a model, with their normalisation statistics."""
    return Model(*({part: kind[part] for part in parts if part in kind} for kind in model))


def share_warm_start(experiment: Experiment, root: str | os.PathLike[str] | None = None) -> WarmStart | None:
    """Like `find_warm_start`, on all hosts that train together; only the first host reads files."""
    found = find_warm_start(experiment, root) if hosts.is_first() else None
    if hosts.count() == 1:
        return found
    facts = hosts.from_first(lambda: found and found.facts)
    if facts is None:
        return None
    like = _parts_of(experiment.state_shape.model, facts["parts"])
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
    if (path / CONFIG).exists():
        return path, None
    if (path / f"seed_{seed}" / CONFIG).exists():
        return path / f"seed_{seed}", None
    if path.name.isdigit() and path.parent.name == CHECKPOINTS and (path.parent.parent / CONFIG).exists():
        return path.parent.parent, int(path.name)
    raise UserError(f"{path} holds no run, nor one of seed {seed}; name RUN or RUN/checkpoints/ROUND")


def _what_differs(theirs: dict[str, Any], config: Any, facts: dict[str, Any], ours: dict[str, Any]) -> str:
    """Why equal arrays would make another network, such as other inputs or another normalisation; '' if they do not."""
    of_model = (theirs["model"]["normalisation"], config.model.normalisation)
    # Both 'running' and 'static' use batch statistics in training.
    pairs = {} if set(of_model) <= {"running", "static"} else {"model.normalisation": of_model}
    pairs["data.normalisation"] = theirs["data"]["normalisation"], config.data.normalisation
    pairs |= {f"its inputs' {name}": (facts.get(name), ours.get(name)) for name in _OF_INPUTS}
    for what, (there, here) in json.loads(json.dumps(pairs)).items():
        if there != here:
            return f"{what} is {there!r:.60} there, and {here!r:.60} here"
    return ""


def _labels_seen(
    where: str, folder: pathlib.Path, theirs: dict[str, Any], facts: dict[str, Any], experiment: Experiment
) -> str:
    """Which labels that are hidden in this run the other one was trained on; '' if none or if it is not known."""
    config, ours = experiment.problem.config, dataset_facts(experiment.dataset)
    if labels_revealed(config) or facts.get("name") != ours["name"]:
        return ""
    number = facts.get("num_train")
    if number is None or number != ours["num_train"]:
        warn(f"{where}its data of the same name have {number or '?'} training examples, those of this run "
             f"{ours['num_train']}; whether it saw labels that are hidden in this run is not known")  # fmt: skip
        return ""
    if labels_revealed(theirs):
        return "that run saw the clients' labels (data.reveal_labels), which are hidden in this one"
    seen = _labelled(load_partition(folder / PARTITION, number, theirs["num_clients"]))
    hidden = np.setdiff1d(seen, _labelled(experiment.partition))
    return f"that run was trained on {len(hidden):,} labels that are hidden in this one" if len(hidden) else ""


def _labelled(partition: Partition) -> np.ndarray:
    return np.concatenate([partition.server_index, partition.labelled_rows])
