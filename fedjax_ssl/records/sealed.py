"""JSON files with a checksum of their own entries, so that a change since they were written is told.

dataset.json has what a user of the model must know about its inputs. secret.json has the secret of a private run, from
which its noise and its cohorts are drawn. Only the user may read it. Whoever has it can subtract the noise, so that
nothing else shows it.
"""

import hashlib
import json
import pathlib
from typing import Any

from fedjax_ssl.base.errors import UserError, first_line
from fedjax_ssl.base.files import read_json, replace_file
from fedjax_ssl.records.workdir import DATASET, SECRET

_SUM = "sha256"  # the entry with the checksum of all others
NUM_BYTES = 32  # of a secret


def write_sealed(path: pathlib.Path, entries: dict[str, Any], mode: int = 0o666) -> None:
    """Writes a dict that JSON can hold, with its checksum; `mode` as in `fedjax_ssl.base.files.replaced`."""
    replace_file(path, json.dumps({**entries, _SUM: _sum(entries)}, indent=2) + "\n", mode)


def read_sealed(path: pathlib.Path) -> dict[str, Any]:
    """The dict in a file of `write_sealed`.

    Raises OSError if it cannot be read, ValueError if it is damaged, or another file.
    """
    entries = read_json(path)
    if not isinstance(entries, dict) or entries.pop(_SUM, None) != _sum(entries):
        raise ValueError("it is not what was written")
    return entries


def _sum(entries: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def write_dataset(folder: pathlib.Path, facts: dict[str, Any]) -> None:
    """Writes the facts, see `fedjax_ssl.data.dataset_facts`, into a run's folder."""
    write_sealed(folder / DATASET, facts)


def read_dataset(folder: pathlib.Path) -> dict[str, Any]:
    """The facts in a run's folder. Raises a UserError if the file is missing, or has changed since it was written."""
    try:
        return read_sealed(folder / DATASET)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder / DATASET} is damaged ({first_line(error)}); put a copy back, or resume the run with more "
            "rounds, which writes it anew"
        ) from error


def write_secret(folder: pathlib.Path, secret: bytes) -> None:
    """Writes a run's secret."""
    write_sealed(folder / SECRET, {"secret": secret.hex()}, mode=0o600)


def read_secret(folder: pathlib.Path) -> bytes:
    """A run's secret. Raises a UserError if it is missing or damaged.

    With another one the run would publish its rounds with other noise.
    """
    try:
        return bytes.fromhex(read_sealed(folder / SECRET)["secret"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = getattr(error, "strerror", None) or "it is not what was written"
        raise UserError(
            f"cannot read the secret of the private run, {folder / SECRET}: {why}; put it back, or train in another "
            "workdir"
        ) from error
