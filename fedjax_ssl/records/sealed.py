"""JSON files with a checksum of their own entries, so that a change since they were written is told."""

import hashlib
import json
import pathlib
from typing import Any

from fedjax_ssl.base.files import read_json, replace_file

_SUM = "sha256"  # the entry with the checksum of all others


def write_sealed(path: pathlib.Path, entries: dict[str, Any], mode: int = 0o666) -> None:
    """Writes a dict that JSON can hold, with its checksum; `mode` as in `fedjax_ssl.base.files.replaced`."""
    replace_file(path, json.dumps({**entries, _SUM: _sum(entries)}, indent=2) + "\n", mode)


def read_sealed(path: pathlib.Path) -> dict[str, Any]:
    """The dict in a file of `write_sealed`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or another file.
    """
    entries = read_json(path)
    if not isinstance(entries, dict) or entries.pop(_SUM, None) != _sum(entries):
        raise ValueError("it is not what was written")
    return entries


def _sum(entries: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
