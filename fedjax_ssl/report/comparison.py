"""Several runs in one report: curves with a band over seeds, and the table as HTML, CSV, Markdown and LaTeX."""

import functools
import os
import pathlib
from collections.abc import Callable, Collection, Iterable
from typing import Any

from matplotlib.figure import Figure

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.files import writing
from fedjax_ssl.records.groups import Group, name_data_sets, read_groups, what_differs
from fedjax_ssl.records.runs import RunRecords
from fedjax_ssl.records.words import number_of
from fedjax_ssl.report import figures, page, style
from fedjax_ssl.report.look import PLAIN, Look, best_cells, to_latex, write_table, write_tables
from fedjax_ssl.report.table import CONFIDENCE, ERROR, LAST, OverSeeds, Row, make_table

MANY = 12  # the most curves in one picture
ERRORS = "Percent, mean ± standard error over seeds."
_MANY_SETS = "whose accuracies cannot be compared: each has pictures of its own, and the table names it."


def write_comparison(
    folders: Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    target: float = 0.9,
    against: str | os.PathLike[str] | None = None,
    table_name: str | None = None,
    look: Look = PLAIN,
    size: str = style.SCREEN,
    only: Collection[pathlib.Path] = (),
) -> pathlib.Path:
    """Writes a page NAME.html that compares runs, and its table, NAME.csv, .md and .tex; returns the page's path.

    NAME_runs.csv has a line for each run, NAME_figures/ the pictures of each data set, as PNG, SVG and PDF.

    Args:
        folders: runs, folders of seeds, or sweeps. Runs that differ only in the seed are one row and one curve.
        out: the page's path, NAME.html.
        target: rounds and bytes are counted until this accuracy, a share, on the set that runs measure each round.
        against: runs of one configuration, from which a further table has the others' differences, paired by seed,
            also in NAME_differences.csv, .md and .tex; None: no such table.
        table_name: name of the tables' files, without a suffix; None: the page's name; '': no files.
        look: of the tables: columns, intervals, caption and label.
        size: of the pictures, one of `style.SIZES`.
        only: the folders of the runs that are shown; (): all.

    Raises:
        UserError: a folder holds no run, none has finished a round, `against` has several configurations or no seed of
            another one, or the page cannot be written.
    """
    path = pathlib.Path(out)
    if path.suffix != ".html":
        raise UserError(f"the page must be named NAME.html, not {path}")
    if not 0 < target <= 1:
        raise UserError(f"the accuracy to be reached must be a share above 0 and at most 1, not {target:g}")
    groups, skipped = read_groups(map(pathlib.Path, folders), rows_alone=True, only=only)
    names = name_data_sets(groups)
    sets = list(dict.fromkeys(names))
    rows = [_row(group, {"data set": name} if len(sets) > 1 else {}) for group, name in zip(groups, names)]
    table = make_table(rows, target)
    shown = look.of(table)
    found, missed = ([], []) if against is None else read_groups([pathlib.Path(against)])
    apart = _differences(groups, found, pathlib.Path(against)) if against is not None else []
    interval = f"half of the {100 * CONFIDENCE:g} % confidence interval over seeds"
    spread = interval if look.interval else "standard deviation over seeds (of n - 1)"
    of_sets = {data: [group for group, name in zip(groups, names) if name == data] for data in sets}
    page.write_page(
        path,
        f"{number_of(len(groups), 'configuration')}, {number_of(sum(len(group.runs) for group in groups), 'run')}",
        f"Data: {', '.join(sets)}. Curves are means over the seeds that have the round, bands reach from the least to "
        f"the most. Accuracies in the table are percent, mean ± {spread}.",
        [
            *_notes([*groups, *found], [*skipped, *missed]),
            {"note": len(sets) > 1 and f"The runs are on {len(sets)} data sets, {_MANY_SETS}"},
            page.section("Table", _as_html(shown)),
            page.section("Differences, paired by seed", *([{"text": ERRORS}, _as_html(apart)] if apart else [])),
            page.section("What differs", _what_differs(groups)),
            page.section("Labels", _labels_held(groups)),
            *map(_pictures(path, of_sets, size).section, ("Accuracy", "Pseudo-labels")),
            page.section("As LaTeX", {"code": to_latex(shown, best_cells(table), look.caption, look.label)}),
        ],
    )
    name = path.stem if table_name is None else table_name
    if name:
        write_tables(path.with_name(name), rows, target, look)
    if name and apart:
        write_table(path.with_name(f"{name}_differences"), apart)
    return path


def _row(group: Group, values: dict[str, Any]) -> Row:
    return Row(group.name, values, group.runs, len(group.runs), group.runs[0].labels_revealed)


def _notes(groups: list[Group], skipped: list[str]) -> list[page.Part]:
    """What a reader must know of runs that could not be read, are damaged, not finished or ended early."""
    runs = {run.folder.resolve(): run for group in groups for run in group.runs}.values()
    unfinished = ", ".join(f"{run.folder} ({run.standing()})" for run in runs if not run.is_finished)
    early = "; ".join(f"{run.folder} ({run.standing()}: {run.why_ended()})" for run in runs if run.why_ended())
    return [
        *({"note": line} for line in dict.fromkeys([*skipped, *(line for run in runs for line in run.damages)])),
        {"note": unfinished and f"Not finished, and shown as far as they are: {unfinished}"},
        {"note": early and f"Ended before their last round: {early}"},
    ]


def _as_html(table: list[dict[str, Any]]) -> page.Part:
    return {"table": page.Table(list(table[0]), [list(row.values()) for row in table])}


def _differences(groups: list[Group], found: list[Group], against: pathlib.Path) -> list[dict[str, Any]]:
    """The table of the other groups' differences from those found in the folder `against`, which must be one."""
    if len(found) > 1:
        raise UserError(f"differences need one configuration to compare with; {against} has {len(found)}")
    (reference,) = found
    its_runs = {run.folder.resolve() for run in reference.runs}
    others = []
    wanted = reference.runs[0].content
    for group in groups:
        if its_runs & {run.folder.resolve() for run in group.runs}:
            reference = reference._replace(name=group.name)
        elif group.runs[0].content == wanted:
            others.append(group)
    rows = paired_differences(others, reference)
    if not rows:
        raise UserError(f"no other run on the same data set has a seed of those in {against}")
    return rows


def paired_differences(groups: list[Group], reference: Group) -> list[dict[str, Any]]:
    """Means over seeds of a run's figure minus that of the reference's run with the same seed.

    Runs of a seed share partition, initialisation and cohorts. Each group that shares a seed with the reference has a
    row, column -> text, number or `OverSeeds`; accuracies are percent, '-' if no pair measured them on the same set.
    """
    by_seed, rows = {run.config["seed"]: run for run in reference.runs}, []
    for group in groups:
        pairs = [(run, by_seed[run.config["seed"]]) for run in group.runs if run.config["seed"] in by_seed]
        if pairs:
            row = {"method": group.name, "minus": reference.name, "seeds": len(pairs)}
            row["test accuracy"] = OverSeeds([_of_tests(*pair) for pair in pairs], spread=ERROR)
            last = OverSeeds([_of_rounds(*pair) for pair in pairs], spread=ERROR)
            rows.append({**row, f"last {LAST} rounds ({reference.measured})": last})
    return rows


def _of_tests(run: RunRecords, other: RunRecords) -> float | None:
    """The difference in percent between last models on the test set; None if one was not measured."""
    values = run.tested("test_accuracy"), other.tested("test_accuracy")
    return None if None in values else 100 * (values[0] - values[1])


def _of_rounds(run: RunRecords, other: RunRecords) -> float | None:
    """The difference in percent between means of the last rounds; None if they are on different images."""
    if run.config["data"]["validation"] != other.config["data"]["validation"]:
        return None
    return 100 * (run.accuracy()[-LAST:].mean() - other.accuracy()[-LAST:].mean())


def _what_differs(groups: list[Group]) -> page.Part:
    """A table of the fields in which rows differ, a column for each; {} if the rows' names say as much."""
    differing = what_differs(groups)
    rows = [[group.name, *(values[place] for values in differing.values())] for place, group in enumerate(groups)]
    if all(set(row) == {row[0]} for row in rows):
        return {}
    return {"table": page.Table(["method", *differing], rows)}


def _labels_held(groups: list[Group]) -> page.Part:
    """Who holds labels: a sentence if it is the same for all, else a table."""
    held = {group.name: group.runs[0].who_has_labels(counted=False) for group in groups}
    if len(set(held.values())) == 1:
        return {"text": f"In all runs: {next(iter(held.values()))}."}
    return {"table": page.Table(["method", "who holds labels"], [list(row) for row in held.items()], long=(1,))}


def _pictures(path: pathlib.Path, of_sets: dict[str, list[Group]], size: str) -> page.Pictures:
    """Draws the pictures of each data set beside the page."""
    pictures = page.Pictures(path.with_name(f"{path.stem}_figures"), pdf=True)
    with writing(path), style.styled(size):
        for data, groups in of_sets.items():
            _draw(groups, pictures, data if len(of_sets) > 1 else "")
    return pictures


def _draw(groups: list[Group], pictures: page.Pictures, data: str = "") -> None:
    """Draws the pictures of groups on one data set, each with as many groups as one picture can hold.

    `data` is the data set's name, if captions must contain it.
    """
    sets = sorted({group.measured for group in groups})
    percent = functools.partial(figures.over_rounds, top=100)

    def add(title: str, name: str, draw: Callable[[list[Group]], Figure | None], caption: str) -> None:
        for values, bundle in bundles(groups).items():
            which = [words for words in (data, values) if words]
            said = f"{', '.join(which)}. {caption}" if which else caption
            pictures.add(title, "_".join([name, *which]), draw(bundle), said)

    for of in sets:
        draw = functools.partial(figures.accuracy, measured=of)
        add("Accuracy", f"{of}_accuracy", draw, f"{of.capitalize()} accuracy.")
    for of in sets:
        draw = functools.partial(figures.accuracy_over_bytes, measured=of)
        add("Accuracy", f"{of}_accuracy_over_bytes", draw, f"{of.capitalize()} accuracy over what has travelled.")
    measures = {name: words for group in groups for name, words in group.runs[0].measures().items()}
    for name, words in ((f"{of}_{name}", f"{of} {words}") for of in sets for name, words in measures.items()):
        draw = functools.partial(percent, metric=name, label=f"{words} (%)")
        add("Accuracy", name, draw, f"{words[:1].upper()}{words[1:]}.")
    add("Accuracy", "client_accuracy", _clients, "Accuracy on each client's mix of classes, last models.")
    labels = functools.partial(percent, metric="pseudo_label_accuracy", label="pseudo-labels that are right (%)")
    add("Pseudo-labels", "pseudo_label_accuracy", labels, "Pseudo-labels that are right.")
    add("Pseudo-labels", "qualified_per_client", figures.qualified, "Examples that a client trains on.")


def _clients(groups: list[Group]) -> Figure | None:
    found = {group.name: [run.client_accuracy() for run in group.runs] for group in groups}
    return figures.client_accuracy({name: [a for a in of_runs if a is not None] for name, of_runs in found.items()})


def bundles(groups: list[Group]) -> dict[str, list[Group]]:
    """Divides many curves into pictures: the values of a sweep's grid -> its groups, named without the values."""
    if len(groups) <= MANY:
        return {"": groups}
    by_values: dict[str, list[Group]] = {}
    for group in groups:
        name, slash, values = group.name.rpartition("/")
        by_values.setdefault(values if slash else "", []).append(group._replace(name=name if slash else group.name))
    split = {}
    for values, curves in by_values.items():
        for part, start in enumerate(range(0, len(curves), MANY)):
            again = f" (part {part + 1})" if len(curves) > MANY else ""
            split[f"{values}{again}".strip()] = curves[start : start + MANY]
    return split
