"""A self-contained HTML page for light and dark mode and any width, which needs no network; see page.html.jinja.

A part of a page is a dict: {"note": a highlighted line}, {"text": a paragraph}, {"code": preformatted text},
{"tiles": name -> value, in large print}, {"table": Table}, which may be {"folded": title} until a click,
{"pictures": [Picture]}, or {"section": heading, "parts": parts}.
"""

import itertools
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from fedjax_ssl.base.errors import printable
from fedjax_ssl.base.files import replace_file, writing
from fedjax_ssl.report import style

Part = Mapping[str, Any]


class Picture(NamedTuple):
    """A picture of a page."""

    svg: str  # the <svg> element
    caption: str  # what it shows, in a sentence or two
    wide: bool = False  # whether it takes the page's whole width


class Table(NamedTuple):
    """A table of a page."""

    columns: list[str]  # headings; not shown if all are empty
    rows: list[list[Any]]  # of cells
    long: tuple[int, ...] = ()  # numbers of the columns whose text may go over several lines


class Pictures:
    """The pictures of a page, by section; each is saved in a folder when it is added, with `pdf` also as PDF."""

    def __init__(self, folder: pathlib.Path, pdf: bool = False):
        self._folder, self._pdf = folder, pdf
        self._made: dict[str, list[Picture]] = {}
        self._names: set[str] = set()

    def add(self, section: str, name: str, figure: Figure | None, caption: str, wide: bool = False) -> None:
        """Saves a figure and keeps it for a section; None: there is no data for it."""
        if figure is None:
            return
        name = re.sub(r"[^A-Za-z0-9=.,+-]+", "_", name).strip("_")[:120]
        names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        name = next(free for free in names if free not in self._names)
        self._names.add(name)
        svg = style.save(figure, self._folder, name, self._pdf)
        self._made.setdefault(section, []).append(Picture(svg, caption, wide))

    def section(self, title: str, *parts: Part) -> Part:
        """The section's pictures and further parts below its heading."""
        return section(title, {"pictures": self._made.get(title)}, *parts)


def section(title: str, *parts: Part) -> Part:
    """A heading and its parts without those that are empty; {} if all are."""
    present = _present(parts)
    return {"section": title, "parts": present} if present else {}


def _present(parts: Iterable[Part]) -> list[Part]:
    return [part for part in parts if any(part.values())]


def write_page(path: pathlib.Path, title: str, lead: str, parts: Iterable[Part]) -> None:
    """Writes the page atomically. Raises UserError if the file cannot be written."""
    text = render("page.html.jinja", str, title=title, lead=lead, parts=_present(parts))
    with writing(path):
        replace_file(path, text)


def render(template: str, escape: Callable[[str], str], **values: Any) -> str:
    """Fills values into a template of this folder.

    `escape` is applied to each value, whose letters that cannot be shown are replaced before. Jinja escapes them for
    HTML after it, unless it returns a `Markup`.
    """
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        finalize=lambda value: value if hasattr(value, "__html__") else escape(printable(str(value))),
        trim_blocks=True,
    )
    return environment.get_template(template).render(**values).rstrip() + "\n"
