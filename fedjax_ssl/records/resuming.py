"""Reads from a workdir what is needed to resume its run or runs."""

import contextlib
import json
import pathlib
from typing import Any

from ml_collections import ConfigDict

from fedjax_ssl.config import add_section, base_config, complete, flatten
from fedjax_ssl.errors import UserError
from fedjax_ssl.files import read_json, replace_file
from fedjax_ssl.records.workdir import CONFIG, SEEDS, forbidden_changes, read_config, refuse_code


def save_seeds(folder: pathlib.Path, seeds: tuple[int, ...]) -> None:
    """Adds seeds to the list of those that commands train in a folder's subfolders, which may not exist yet."""
    folder.mkdir(parents=True, exist_ok=True)  # the user has named it
    earlier: tuple[int, ...] = ()
    with contextlib.suppress(ValueError, TypeError, OverflowError):  # a damaged list is replaced
        earlier = _read_seeds(folder)
    replace_file(folder / SEEDS, json.dumps(list(dict.fromkeys([*earlier, *seeds]))) + "\n")


def _read_seeds(folder: pathlib.Path) -> tuple[int, ...]:
    return tuple(map(int, read_json(folder / SEEDS))) if (folder / SEEDS).is_file() else ()


def saved_config(workdir: str, allow_code: bool) -> ConfigDict | None:
    """The configuration of the run, or of the runs of several seeds, in a workdir; None if it has neither.

    Args:
        workdir: need not exist.
        allow_code: whether to import a method or a model from a file that the configuration names; somebody else may
            have written the configuration.

    Raises:
        UserError: the configuration cannot be read, or it names code and that is not allowed.
    """
    folder = pathlib.Path(workdir)
    try:
        seeds = _read_seeds(folder)
        places = [folder, *(folder / f"seed_{seed}" for seed in seeds)]
        places = [place for place in places if (place / CONFIG).is_file()]
    except (OSError, ValueError, TypeError, OverflowError) as error:  # OverflowError: Infinity as a seed
        raise UserError(f"cannot read the workdir {workdir!r}: {' '.join(str(error).split())}") from error
    if not places:
        return None
    found = {place: read_config(place) for place in places}
    of_seeds = [{**complete(saved), "seed": 0} for saved in found.values()]
    # Commands may have begun seeds with different num_rounds: the one that all others can be resumed with.
    fitting = [not any(forbidden_changes(other, one) for other in of_seeds) for one in of_seeds]
    place = places[fitting.index(True) if any(fitting) else 0]
    saved = found[place]
    if not allow_code:
        remedy = "if you trust it, resume it with --allow_code, or by the command that began it"
        refuse_code(place, complete(saved), remedy)
    return typed(saved, place / CONFIG, seeds)


def typed(saved: dict[str, Any], where: str | pathlib.Path, seeds: tuple[int, ...] = ()) -> ConfigDict:
    """Converts a configuration that was read from JSON to the types of its fields.

    Args:
        saved: the configuration.
        where: its file, for the message.
        seeds: the seeds of the result, if there are any.

    Raises:
        UserError: a field does not accept its value.
    """
    config = base_config()
    config.method = saved.get("method", config.method)
    add_section(config)
    fields = flatten(complete(saved))
    for name, value in fields.items():
        try:
            config.update_from_flattened_dict({name: tuple(value) if isinstance(value, list) else value})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{where}: {name} is {value!r}: {' '.join(str(error).split())}") from error
    if seeds:
        config.seeds, config.seed = seeds, base_config().seed
    return config
