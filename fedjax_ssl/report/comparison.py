"""Several runs in one report: curves with a band over seeds, and the table as HTML, CSV, Markdown and LaTeX."""

import os
import pathlib
from collections.abc import Iterable

from fedjax_ssl.config import who_has_labels
from fedjax_ssl.errors import UserError
from fedjax_ssl.files import replace_file
from fedjax_ssl.records.runs import Group, read_groups
from fedjax_ssl.report import figures, page, style
from fedjax_ssl.report.differences import paired_differences
from fedjax_ssl.report.table import Row, make_table, to_csv, to_latex, to_markdown

MANY = 12  # curves that one picture can hold


def write_comparison(
    folders: Iterable[str | os.PathLike],
    out: str | os.PathLike,
    target: float = 0.9,
    against: str | os.PathLike | None = None,
) -> pathlib.Path:
    """Writes a page that compares runs, with the same table in OUT.csv, OUT.md and OUT.tex.

    Args:
        folders: runs, folders of several seeds' runs, or whole sweeps. Runs that differ in nothing but the seed are
            one row and one curve.
        out: the page's path, NAME.html.
        target: accuracy on the set that runs measure each round, a share, to which rounds and bytes are counted.
        against: the runs of one configuration; a further table has the others' differences from it, paired by seed,
            also in NAME_differences.csv, .md and .tex. None: no such table.

    Returns:
        The page's path.

    Raises:
        UserError: a folder holds no run, none has finished a round, `against` has several configurations or no seed of
            another one, or the page cannot be written.
    """
    path = pathlib.Path(out)
    if path.suffix != ".html":
        raise UserError(f"the page must be named NAME.html, not {path}")
    if not 0 < target <= 1:
        raise UserError(f"the accuracy to be reached must be a share above 0 and at most 1, not {target}")
    groups, skipped = read_groups(map(pathlib.Path, folders))
    rows = [Row(g.name, {}, g.runs, len(g.runs), g.runs[0].labels_revealed) for g in groups]
    table = make_table(rows, target)
    apart = [] if against is None else _differences(groups, pathlib.Path(against))
    skipped += [line for group in groups for run in group.runs for line in run.damages]
    unfinished = [f"{run.folder} ({run.standing()})" for group in groups for run in group.runs if not run.is_finished]
    with style.styled():
        drawn = _draw(groups)
    page.write_page(
        path,
        f"{len(groups)} configurations, {sum(len(group.runs) for group in groups)} runs",
        "Curves are means over seeds, bands reach from the least to the most. Accuracies in the table are percent, "
        "mean ± standard deviation over seeds.",
        *(page.note(line) for line in skipped),
        page.note(f"Not finished, and shown as far as they are: {', '.join(unfinished)}") if unfinished else "",
        page.section("Table", _as_html(table)),
        page.section("Differences, paired by seed", _paired(apart)) if apart else "",
        page.section("Labels", _labels_held(groups)),
        *(page.section(title, page.pictures(drawings)) for title, drawings in drawn.items()),
        page.section("As LaTeX", page.code(to_latex(table))),
    )
    for suffix, write in {".csv": to_csv, ".md": to_markdown, ".tex": to_latex}.items():
        replace_file(path.with_suffix(suffix), write(table))
        if apart:
            replace_file(path.with_name(f"{path.stem}_differences{suffix}"), write(apart))
    return path


def _as_html(table: list[dict[str, str]]) -> str:
    return page.table(list(table[0]), [list(row.values()) for row in table])


def _paired(apart: list[dict[str, str]]) -> str:
    return page.paragraph("Percent, mean ± standard error over seeds.") + _as_html(apart)


def _differences(groups: list[Group], against: pathlib.Path) -> list[dict[str, str]]:
    """The table of the other groups' differences from the runs in a folder."""
    found, _ = read_groups([against])
    if len(found) > 1:
        raise UserError(f"differences are from one configuration; {against} has {len(found)}")
    (reference,) = found
    its_runs = {run.folder.resolve() for run in reference.runs}
    others = []
    for group in groups:
        if its_runs & {run.folder.resolve() for run in group.runs}:
            reference = reference._replace(name=group.name)
        else:
            others.append(group)
    rows = paired_differences(others, reference)
    if not rows:
        raise UserError(f"no other run has a seed of those in {against}")
    return rows


def _labels_held(groups: list[Group]) -> str:
    """Who holds labels: a sentence if it is the same for all, else a table."""
    held = {group.name: who_has_labels(group.runs[0].config) for group in groups}
    if len(set(held.values())) == 1:
        (text,) = set(held.values())
        return page.paragraph(f"In all runs: {text}.")
    return page.table(["method", "who holds labels"], [list(row) for row in held.items()], long=(1,))


def _draw(groups: list[Group]) -> dict[str, list[page.Picture]]:
    """Section -> its pictures, one for each bundle of curves that one picture can hold."""
    made: dict[str, list[page.Picture]] = {}

    sets = sorted({group.measured for group in groups})

    def add(title: str, draw, caption: str) -> None:
        for name, bundle in bundles(groups).items():
            figure = draw(bundle)
            if figure is not None:
                said = f"{name}. {caption}" if name else caption
                made.setdefault(title, []).append(page.Picture(style.inline_svg(figure, said), said))

    for of in sets:
        add("Accuracy", lambda groups, of=of: figures.accuracy(groups, of), f"{of.capitalize()} accuracy.")
    for of in sets:
        add(
            "Accuracy",
            lambda groups, of=of: figures.accuracy_over_bytes(groups, of),
            f"{of.capitalize()} accuracy over what has travelled.",
        )
    for of in sets:
        for name, words in {name: words for g in groups for name, words in g.runs[0].measures().items()}.items():
            add(
                "Accuracy",
                lambda groups, of=of, name=name, words=words: _measure(groups, f"{of}_{name}", f"{of} {words} (%)"),
                f"{of.capitalize()} {words}.",
            )
    add("Pseudo-labels", _labels, "Pseudo-labels that are right.")
    add("Pseudo-labels", figures.qualified, "Examples that a client trains on.")
    return made


def _measure(groups: list[Group], metric: str, label: str):
    if not any(group.has(metric) for group in groups):
        return None
    return figures.over_rounds(groups, metric, label, 100, top=100)


def _labels(groups: list[Group]):
    if not any(group.has("pseudo_label_accuracy") for group in groups):
        return None
    return figures.over_rounds(groups, "pseudo_label_accuracy", "pseudo-labels that are right (%)", 100, top=100)


def bundles(groups: list[Group]) -> dict[str, list[Group]]:
    """Groups of curves for one picture each: many curves are divided by the values of a sweep's grid.

    Returns:
        What they have in common -> the groups, named by what is left.
    """
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
