"""dataset.json: what a user of the model must know about its inputs, with a checksum."""

import hashlib
import json
import pathlib
from typing import Any

from fedjax_ssl.errors import UserError, first_line
from fedjax_ssl.files import read_json, replace_file
from fedjax_ssl.kinds import wrong_facts
from fedjax_ssl.records.workdir import DATASET

_SUM = "sha256"  # of the other entries; missing in files of earlier versions


def write_dataset(folder: pathlib.Path, facts: dict[str, Any]) -> None:
    """Writes the facts, see `fedjax_ssl.data.dataset_facts`, into a run's folder."""
    replace_file(folder / DATASET, json.dumps({**facts, _SUM: _sum(facts)}, indent=2) + "\n")


def read_dataset(folder: pathlib.Path) -> dict[str, Any]:
    """The facts in a run's folder, as they were written; {} without the file, as in folders of earlier versions.

    Raises:
        UserError: the file cannot be read, has changed since it was written, or describes no valid inputs.
    """
    path = folder / DATASET
    if not path.exists():
        return {}
    try:
        facts = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}); {_REMEDY}") from error
    if not isinstance(facts, dict):
        raise UserError(f"{path} holds no object; {_REMEDY}")
    digest = facts.pop(_SUM, None)
    if digest is not None and digest != _sum(facts):
        raise UserError(f"{path} is damaged: it is not what was written; {_REMEDY}")
    wrong = _what_is_wrong(facts)
    if wrong:
        raise UserError(f"{path}: {wrong}; {_REMEDY}")
    return facts


_REMEDY = "put a copy back, or resume the run with more rounds, which writes it anew"


def _sum(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _what_is_wrong(facts: dict[str, Any]) -> str:
    """Which entry is not valid, in words; '' if all are."""
    classes, names = facts.get("num_classes"), facts.get("class_names")
    if type(classes) is not int or classes < 2:
        return f"num_classes is {classes!r}; it must be a whole number from 2 on"
    if names and not (isinstance(names, list) and len(names) == classes and all(isinstance(n, str) for n in names)):
        return f"class_names must be {classes} names"
    return wrong_facts(facts)
