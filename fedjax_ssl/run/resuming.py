"""The configuration that resumes the run or the runs in a workdir."""

import pathlib

from ml_collections import ConfigDict

from fedjax_ssl.config import typed
from fedjax_ssl.records.workdir import CONFIG, forbidden_changes, read_config, read_seeds, refuse_code


def saved_config(workdir: str, allow_code: bool) -> ConfigDict | None:
    """The configuration of the run, or of the runs of several seeds, in a workdir; None if it has neither.

    Raises a UserError if the configuration cannot be read, or names code to import, which somebody else may have
    written, and `allow_code` is False.
    """
    folder = pathlib.Path(workdir)
    seeds = read_seeds(folder)
    places = [folder, *(folder / f"seed_{seed}" for seed in seeds)]
    found = {place: read_config(place) for place in places if (place / CONFIG).is_file()}
    if not found:
        return None
    of_seeds = [{**saved, "seed": 0} for saved in found.values()]
    # Commands may have begun seeds with different num_rounds: the one that all others can be resumed with.
    fitting = [not any(forbidden_changes(other, one) for other in of_seeds) for one in of_seeds]
    place, saved = list(found.items())[fitting.index(True) if any(fitting) else 0]
    if not allow_code:
        remedy = "if you trust it, resume it with --allow_code, or by the command that began it"
        refuse_code(place, saved, remedy)
    return typed(saved, place / CONFIG, seeds)
