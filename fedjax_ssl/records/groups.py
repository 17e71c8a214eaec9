"""Groups runs that differ only in the seed."""

import collections
import json
import pathlib
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.base.errors import UserError, printable
from fedjax_ssl.base.fields import CHANGES_NO_RESULT, differences, flatten
from fedjax_ssl.base.files import read_json
from fedjax_ssl.records.runs import RunRecords, find_runs, read_run
from fedjax_ssl.records.workdir import ROWS


class Group(NamedTuple):
    """Runs that differ only in the seed."""

    name: str  # for people, from their folders
    runs: list[RunRecords]  # at least one

    def values(self, name: str) -> np.ndarray:
        """float [seeds, rounds], one metric; NaN after the end of a shorter run."""
        rows = [run.values(name) for run in self.runs]
        longest = max(map(len, rows))
        return np.stack([np.pad(row, (0, longest - len(row)), constant_values=np.nan) for row in rows])

    @property
    def measured(self) -> str:
        """The set that is measured each round, 'validation' or 'test'."""
        return self.runs[0].measured

    def has(self, name: str) -> bool:
        """Whether any run measured the metric."""
        return any(run.has(name) for run in self.runs)


def name_data_sets(groups: list[Group]) -> list[str]:
    """The name of each group's data set; if several share a name, with the fields that say where they are from."""
    names = [group.runs[0].dataset().get("name", group.runs[0].config["data"]["source"]) for group in groups]
    contents = [group.runs[0].content for group in groups]

    def sharing(names: list[str], name: str) -> list[str]:
        return list(dict.fromkeys(content for content, other in zip(contents, names) if other == name))

    fields = [printable(", ".join(map(str, filter(None, group.runs[0].data_fields)))) for group in groups]
    longer = [name if len(sharing(names, name)) == 1 else f"{name} ({own})" for name, own in zip(names, fields)]
    # A file whose content has changed between the runs.
    versions = [sharing(longer, name) for name in longer]
    return [
        name if len(found) == 1 else f"{name}, version {found.index(content) + 1}"
        for name, found, content in zip(longer, versions, contents)
    ]


def what_differs(groups: list[Group]) -> dict[str, list[str]]:
    """The fields in which the groups' configurations differ: field -> its value in each group.

    The value is '-' if the field belongs to another method; only groups that have the field are compared. Seeds and
    fields that change no result are left out.
    """
    flat = []
    for group in groups:
        foreign = group.runs[0].other_sections
        fields = {name: str(value) for name, value in flatten(group.runs[0].config).items()}
        flat.append({name: value for name, value in fields.items() if name.partition(".")[0] not in foreign})
    names = [name for name in dict.fromkeys(name for fields in flat for name in fields) if name not in _OF_NO_GROUP]
    values = {name: [printable(fields.get(name, "-")) for fields in flat] for name in names}
    return {name: of_groups for name, of_groups in values.items() if len({*of_groups} - {"-"}) > 1}


def read_groups(
    folders: Iterable[pathlib.Path], rows_alone: bool = False, only: Collection[pathlib.Path] = ()
) -> tuple[list[Group], list[str]]:
    """Reads all runs in some folders, in groups that differ only in the seed; a group has each seed once.

    Args:
        rows_alone: leave out a sweep's runs that belong to no row, such as warm-ups and tries, unless there are no
            others.
        only: the folders of the runs that are read; (): all.

    Returns:
        The groups, in the order of the folders, and a line for each run that could not be read.

    Raises:
        UserError: a folder holds no run at all, or none of them has finished a round.
    """
    read: list[tuple[str, RunRecords]] = []
    seen, skipped = set(), []
    for folder in folders:
        rows = _sweep_rows(folder)
        places = {row: place for place, row in enumerate(rows)}
        found = find_runs(folder)
        if rows_alone:
            found = [path for path in found if _row_of(folder, path) in rows] or found
        found = [path for path in found if not only or path in only]
        for path in sorted(found, key=lambda path: places.get(_row_of(folder, path), len(places))):
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            try:
                read.append((rows.get(_row_of(folder, path)) or _name(folder, path), read_run(path)))
            except UserError as error:
                skipped.append(str(error))
    if not read:
        raise UserError(skipped[0])
    groups: dict[tuple[str, int], list[tuple[str, RunRecords]]] = {}
    times: collections.Counter[tuple[str, int]] = collections.Counter()
    for name, run in read:
        # A second run of the same seed, such as by another version of the code, is not another seed.
        same = (_but_the_seed(run.config) + run.content, run.config["seed"])
        times[same] += 1
        groups.setdefault((same[0], times[same]), []).append((name, run))
    named = [
        Group(", ".join(dict.fromkeys(name for name, _ in own)), [run for _, run in own]) for own in groups.values()
    ]
    return _tell_apart(named), skipped


def _sweep_rows(folder: pathlib.Path) -> dict[str, str]:
    """The rows of a sweep, see `ROWS`; {} for other folders or a damaged file, in which case folders give the names."""
    try:
        rows = read_json(folder / ROWS)
        return {place: printable(name) for place, name in rows.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _row_of(folder: pathlib.Path, run: pathlib.Path) -> str:
    """The folder of a run's row relative to the sweep's; '' for the sweep's folder itself."""
    return run.parent.relative_to(folder).as_posix() if run != folder else ""


def _but_the_seed(config: dict[str, Any]) -> str:
    """What runs must share to form a group."""
    return json.dumps(
        {name: value for name, value in flatten(config).items() if name not in _OF_NO_GROUP}, sort_keys=True
    )


_OF_NO_GROUP = {"seed", "seeds", *CHANGES_NO_RESULT}  # fields in which runs of a group may differ


def _name(given: pathlib.Path, run: pathlib.Path) -> str:
    """A run's name for people: its path below the given folder, without the folder of the seed."""
    place = run.resolve().relative_to(given.resolve().parent)
    parts = place.parts[:-1] if place.name.startswith("seed_") and len(place.parts) > 1 else place.parts
    # The path below a sweep's folder distinguishes its rows.
    return printable("/".join(parts[1:] or parts).replace("_", " "))


def _tell_apart(groups: list[Group]) -> list[Group]:
    """Adds the differences between the configurations, or else the folder, to names that several groups share."""
    names = []
    for group in groups:
        others = [other for other in groups if other.name == group.name and other is not group]
        found = differences(others[0].runs[0].config, group.runs[0].config) if others else {}
        own = [f"{name}={pair[1]}" for name, pair in found.items() if name not in _OF_NO_GROUP]
        names.append(f"{group.name} ({', '.join(own)})" if own else group.name)
    return [
        group._replace(name=name if names.count(name) == 1 else f"{group.name} ({group.runs[0].folder})")
        for group, name in zip(groups, names)
    ]
