"""The model of another run from which a run starts: `config.init_from`."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.files import expanded, read_json
from fedjax_ssl.data import Dataset, Partition, dataset_facts, load_partition
from fedjax_ssl.data.npz import read_arrays
from fedjax_ssl.engine.interface import CLASSIFIER, State
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.sealed import read_dataset
from fedjax_ssl.records.words import is_private, labels_revealed
from fedjax_ssl.records.workdir import CHECKPOINTS, CONFIG, INIT_FROM, PARTITION, read_config
from fedjax_ssl.run import hosts
from fedjax_ssl.run.experiment import Experiment
from fedjax_ssl.run.observe.log import warn

NO_SUMS = np.zeros(0, np.uint64)
# Facts of a data set on which the network depends.
_OF_INPUTS = ("kind", "image_shape", "shape", "columns", "categories", "tokenizer", "encoder_side", "weights")


class WarmStart(NamedTuple):
    """What a run starts from."""

    model: Model  # the parts that both runs have, with their normalisation statistics, on the host
    facts: dict[str, Any]  # for init_from.json and the summary: the other run's folder, method and round, and the parts
    seen: np.ndarray  # uint64, `row_sums` of the examples whose labels the model has seen so far; [0]: none is known


def find_warm_start(experiment: Experiment, root: str | os.PathLike[str] | None = None) -> WarmStart | None:
    """The parts of the model that `init_from` names; None if the field is empty.

    A relative path is first searched in `root`, such as a sweep's folder. Raises a UserError if there is no such
    checkpoint; if its form of inputs, normalisation or arrays differ from this run's; or if it was trained on labels
    that are hidden in this run. The data may be others.
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
        if other := _what_differs(theirs, config, facts, dataset_facts(experiment.dataset)):
            raise UserError(other)
        seen = _labels_seen(where, folder, theirs, facts, experiment)
        was_private = _was_private(folder, theirs)
        order, fitting = _order_of_classes(where, facts, experiment.dataset, tuple(ours.params))
        parts = [part for part in fitting if any(name.startswith(f".model.params[{part!r}]") for name in saved)]
        if not parts or (jax.tree.leaves(ours.params["backbone"]) and "backbone" not in parts):
            raise UserError("its checkpoint has no backbone")
        restored = checkpoints.restore(State(None, _parts_of(ours, parts)), round_number=number, part=True)
    except UserError as error:
        raise UserError(f"{where}{error}") from error
    for line in restored.passed_over:
        warn(f"{where}{line}; the model is that of round {restored.round}")
    if is_private(config) and not was_private:
        warn(f"{where}that model was trained without privacy, and this run's guarantee does not cover its examples")
    told = {"run": str(folder.resolve()), "method": theirs["method"], "round": restored.round, "parts": parts,
            "private": was_private}  # fmt: skip
    model = jax.device_get(restored.state.model)
    if order is not None and "classifier" in parts:
        model = model.with_parts(classifier=jax.tree.map(lambda leaf: leaf[..., order], model.params["classifier"]))
    return WarmStart(model, told, seen)


def _was_private(folder: pathlib.Path, config: dict[str, Any]) -> bool:
    """Whether a run promises privacy, and so does the run whose model it began with, if it is known."""
    try:
        return is_private(config) and (not config["init_from"] or bool(read_json(folder / INIT_FROM)["private"]))
    except (OSError, ValueError, KeyError):
        return False


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
    seen = found.seen if found else NO_SUMS  # the first host writes them into the run's folder
    return WarmStart(hosts.tree_from_first(lambda: found.model, like), facts, seen)


def _find_run(text: str, seed: int, root: str | os.PathLike[str] | None) -> tuple[pathlib.Path, int | None]:
    """The folder of a run and the round of its checkpoint; None: the newest.

    `text` is a run's folder; a folder of several seeds' runs, of which `seed` is used; or RUN/checkpoints/ROUND.
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
) -> np.ndarray:
    """The `row_sums` of all examples whose labels the other run or those before it have seen: uint64, sorted.

    Examples are known by their inputs, whatever the files are called and in whichever order they stand. Inputs that a
    data set has more than once say nothing: rows of a small table are often equal by chance.
    Raises a UserError if labels among them are hidden in this run, as those of test images are.
    """
    config, dataset, file = experiment.problem.config, experiment.dataset, folder / PARTITION
    not_known = f"{where}whether that run saw labels that are hidden in this run is not known"
    has = read_arrays(str(file), (), optional=("row_sums", "earlier_sums")) if file.exists() else {}
    there, here = has.get("row_sums"), dataset.row_sums
    if there is None or here is None:
        warn(f"{not_known}: it has no checksums of its data")
        return NO_SUMS
    visible = there[_visible(load_partition(file, len(there), theirs["num_clients"]), theirs, len(there))]
    seen = np.union1d(np.intersect1d(visible, _once(there)), has.get("earlier_sums", NO_SUMS))
    if facts.get("name") == dataset.name and not np.isin(there, here).any():
        warn(f"{not_known}: its data of the same name have other inputs, perhaps the same in another form")
    known = here[_visible(experiment.partition, config, len(dataset.y_train))]
    has_label = np.ones(len(here), bool)
    has_label[: len(dataset.y_train)] = dataset.y_train >= 0
    hidden = np.setdiff1d(np.intersect1d(np.intersect1d(seen, _once(here)), here[has_label]), known)
    if len(hidden):
        raise UserError(f"that run was trained on {len(hidden):,} labels that are hidden in this one")
    return seen


def _once(sums: np.ndarray) -> np.ndarray:
    """The checksums that occur once, sorted."""
    values, counts = np.unique(sums, return_counts=True)
    return values[counts == 1]


def _visible(partition: Partition, config: Mapping[str, Any], number: int) -> np.ndarray:
    """The rows whose labels a run may see, of so many training examples; see `fedjax_ssl.data.federated.hold`."""
    if labels_revealed(config):
        return np.setdiff1d(
            np.arange(number), np.concatenate([partition.validation_index, *partition.client_test_rows])
        )
    return np.concatenate([partition.server_index, partition.labelled_rows])


def _order_of_classes(
    where: str, facts: dict[str, Any], dataset: Dataset, parts: tuple[str, ...]
) -> tuple[list[int] | None, tuple[str, ...]]:
    """How the other run's classifier fits this run's classes, which are known by their names.

    Returns the place that each class of this run has there, None if it is the same; and the parts that fit. If the
    classes stand in another order these are the backbone and the classifier, if they are others the backbone alone.
    """
    there, here = facts.get("class_names") or [], list(dataset.class_names)
    if there == here or (not (there and here) and facts.get("num_classes") == dataset.num_classes):
        return None, parts
    if sorted(there) == sorted(here):
        warn(f"{where}its classes stand in another order ({_listed(there)}; here {_listed(here)}): they are matched by "
             "name, and parts of the model besides backbone and classifier begin anew")  # fmt: skip
        return [there.index(name) for name in here], CLASSIFIER
    warn(f"{where}its classes are others ({_listed(there)}; here {_listed(here)}): only its backbone is taken")
    return None, ("backbone",)


def _listed(names: list[str]) -> str:
    return f"{', '.join(names):.60}"
