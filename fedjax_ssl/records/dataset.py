"""dataset.json: what a user of the model must know about its inputs, with a checksum."""

import pathlib
from typing import Any

from fedjax_ssl.base.errors import UserError, first_line
from fedjax_ssl.records.sealed import read_sealed, write_sealed
from fedjax_ssl.records.workdir import DATASET


def write_dataset(folder: pathlib.Path, facts: dict[str, Any]) -> None:
    """Writes the facts, see `fedjax_ssl.data.dataset_facts`, into a run's folder."""
    write_sealed(folder / DATASET, facts)


def read_dataset(folder: pathlib.Path) -> dict[str, Any]:
    """The facts in a run's folder, as they were written.

    Raises:
        UserError: the file is missing, or has changed since it was written.
    """
    try:
        return read_sealed(folder / DATASET)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder / DATASET} is damaged ({first_line(error)}); put a copy back, or resume the run with more "
            "rounds, which writes it anew"
        ) from error
