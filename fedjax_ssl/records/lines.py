"""The records in a run's folder, whose lines are numbers of a round, and the summary: reads and checks them."""

import hashlib
import json
import math
import pathlib
from typing import Any, NamedTuple

from fedjax_ssl.base.errors import first_line
from fedjax_ssl.base.files import read_json, read_whole

METRICS, TIMINGS, SUMMARY = "metrics.jsonl", "timings.jsonl", "summary.json"
METRICS_SUM = "metrics_sha256"  # in the summary: the checksum of its records


def checksum_of_records(folder: pathlib.Path, round_number: int) -> str:
    """SHA-256 of the lines of METRICS up to a round."""
    lines = read_whole(folder / METRICS).split(b"\n")[:round_number] if round_number else []
    return hashlib.sha256(b"\n".join(lines)).hexdigest()


class Records(NamedTuple):
    """The usable lines of a .jsonl file."""

    lines: list[dict[str, Any]]  # a dict each, with an int for `round`
    damage: str = ""  # what is wrong with the file, or ''. A last line that a kill cut short is not damage.


def is_of_last_round(summary: dict[str, Any] | None, metrics: list[dict[str, Any]]) -> bool:
    """Whether a run's summary exists and belongs to the last line of its metrics."""
    return summary is not None and bool(metrics) and summary["rounds"] == metrics[-1]["round"]


def read_summary(folder: pathlib.Path) -> tuple[dict[str, Any] | None, str]:
    """A run's summary, a dict with an int for `rounds`, None if it is not usable; and what is wrong with it, or ''."""
    path = folder / SUMMARY
    if not path.exists():
        return None, ""
    try:
        summary = read_json(path)
        if summary[METRICS_SUM] == checksum_of_records(folder, summary["rounds"]):
            return summary, ""
    except (OSError, ValueError, TypeError, KeyError) as error:
        return None, f"{path} is damaged ({type(error).__name__}: {first_line(error)})"
    return None, f"{path} is not of the records in {folder / METRICS}"


def read_records(path: pathlib.Path) -> Records:
    """The lines of a .jsonl file that are records of numbers. Raises OSError if it exists and cannot be opened."""
    if not path.exists():
        return Records([])
    # A last line without \n was cut short by a kill. Only \n ends a line, whatever bytes damage has left.
    lines = read_whole(path).split(b"\n")[:-1]
    parsed = [_parse(line) for line in lines]
    bad = [number for number, record in enumerate(parsed, start=1) if record is None]
    damage = f"line {', '.join(map(str, bad[:5]))} of {path} is damaged" if bad else ""
    return Records([record for record in parsed if record is not None], damage)


def read_rounds(path: pathlib.Path) -> Records:
    """The lines of metrics.jsonl up to the first damaged or missing round; errors as in `read_records`."""
    found = read_records(path)
    gap = next((place for place, line in enumerate(found.lines) if line["round"] != place + 1), None)
    if gap is None:
        return found
    missing = f"round {gap + 1} is missing in {path}"
    return Records(found.lines[:gap], f"{found.damage}; {missing}" if found.damage else missing)


def _parse(line: bytes) -> dict[str, Any] | None:
    """A line's record: its round and other numbers, or lists of them; None for anything else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # no JSON, or bytes that are not UTF-8
        return None
    if not isinstance(record, dict) or type(record.get("round")) is not int:
        return None
    lists = [value if isinstance(value, list) else [value] for value in record.values()]
    is_number = all(value is None or isinstance(value, int | float) for values in lists for value in values)
    return record if is_number else None


def to_line(record: dict[str, Any]) -> str:
    """A record as a line of JSON."""
    return json.dumps(finite(record)) + "\n"


def finite(record: dict[str, Any]) -> dict[str, Any]:
    """Replaces numbers that are not finite by None, because JSON has no NaN."""

    def known(value: Any) -> Any:
        if isinstance(value, list):
            return [known(one) for one in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {name: known(value) for name, value in record.items()}
