"""A self-contained HTML page for light and dark mode and any width, which needs no network."""

import html
import itertools
import pathlib
import re
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from fedjax_ssl.errors import UserError, printable
from fedjax_ssl.files import replace_file
from fedjax_ssl.report import style

_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --card: #f6f8fa;
  --accent: #0969da; --note: #fff8c5; --shade: #00000040; }
@media (prefers-color-scheme: dark) { :root { --ground: #0d1117; --ink: #e6edf3; --soft: #9198a1; --line: #3d444d;
  --card: #151b23; --accent: #4493f8; --note: #3a2f0b; --shade: #ffffff50; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1160px; padding: 1.5rem 1rem 4rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); }
p.lead { color: var(--soft); margin: 0 0 1rem; overflow-wrap: anywhere; }
p.note { background: var(--note); border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem; margin: 1rem 0; }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; }
.tiles dt { color: var(--soft); font-size: .8rem; }
.tiles dd { margin: 0; font-size: 1.3rem; font-weight: 600; overflow-wrap: anywhere; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 28rem), 1fr)); gap: 1.25rem; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 8px; padding: .75rem; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figure svg { display: block; width: 100%; height: auto; }
figure.wide svg { min-width: 34rem; }
figcaption { font-size: .85rem; color: var(--soft); margin-top: .5rem; }
/* A shadow at each side on which there is more to see: covers that scroll along hide it at the ends. */
.scroll, pre { overflow-x: auto;
  background: linear-gradient(to right, var(--ground) 50%, transparent) 0 0 / 2rem 100% local,
  linear-gradient(to left, var(--ground) 50%, transparent) 100% 0 / 2rem 100% local,
  linear-gradient(to right, var(--shade), transparent) 0 0 / .9rem 100%,
  linear-gradient(to left, var(--shade), transparent) 100% 0 / .9rem 100%; background-repeat: no-repeat; }
summary { cursor: pointer; color: var(--accent); margin: 1rem 0; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { text-align: left; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.long { white-space: normal; overflow-wrap: anywhere; min-width: 12rem; }
td { font-variant-numeric: tabular-nums; }
pre { border: 1px solid var(--line); border-radius: 6px; padding: .7rem; font-size: .82rem; }
a { color: var(--accent); }
@media print { figure { break-inside: avoid; } }
"""


class Picture(NamedTuple):
    """A picture of a page."""

    svg: str  # the <svg> element
    caption: str  # what it shows, in a sentence or two
    wide: bool = False  # whether it takes the page's whole width


class Pictures:
    """The pictures of a page, by section; each is saved when it is added.

    Args:
        folder: for the files.
        of: what the pictures are of, for their titles; '': the title is the caption.
        pdf: also saves PDFs.
    """

    def __init__(self, folder: pathlib.Path, of: str = "", pdf: bool = False):
        self._folder, self._of, self._pdf = folder, of, pdf
        self._made: dict[str, list[Picture]] = {}
        self._names: set[str] = set()

    def add(self, section: str, name: str, figure: Figure | None, caption: str, wide: bool = False) -> None:
        """Saves a figure and keeps it for a section; None: there is no data for it."""
        if figure is None:
            return
        title = f"{name.replace('_', ' ').capitalize()}: {self._of}" if self._of else caption
        name = re.sub(r"[^A-Za-z0-9=.,+-]+", "_", name).strip("_")[:120]
        names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        name = next(free for free in names if free not in self._names)
        self._names.add(name)
        svg = style.save(figure, self._folder, name, title, self._pdf)
        self._made.setdefault(section, []).append(Picture(svg, caption, wide))

    def section(self, title: str, *parts: str) -> str:
        """The section's pictures and further parts below its heading; '' if there are none."""
        return section(title, pictures(self._made[title]) if title in self._made else "", *parts)


def _text(text: str) -> str:
    """A line of text as HTML."""
    return html.escape(printable(text))


def tiles(figures: dict[str, str]) -> str:
    """A few figures in large print, from name -> value."""
    cells = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in figures.items())
    return f'<dl class="tiles">{cells}</dl>'


def pictures(shown: list[Picture]) -> str:
    """Pictures side by side, as many as fit."""
    return '<div class="pictures">' + "".join(map(_picture, shown)) + "</div>"


def _picture(picture: Picture) -> str:
    kind, reached = (' class="wide"', ' tabindex="0"') if picture.wide else ("", "")
    return (
        f'<figure{kind}><div class="scroll"{reached}>{picture.svg}</div>'
        f"<figcaption>{_text(picture.caption)}</figcaption></figure>"
    )


def section(title: str, *parts: str) -> str:
    """A heading and its parts; '' if all of them are empty."""
    inside = "".join(part for part in parts if part)
    return f"<section><h2>{_text(title)}</h2>{inside}</section>" if inside else ""


def note(text: str) -> str:
    """A highlighted line."""
    return f'<p class="note">{_text(text)}</p>'


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{_text(text)}</p>"


def code(text: str) -> str:
    """Preformatted text."""
    return f'<pre tabindex="0">{html.escape(text)}</pre>'


def folded(title: str, inside: str) -> str:
    """A part of the page that a click on its title opens."""
    return f"<details><summary>{_text(title)}</summary>{inside}</details>"


def table(columns: list[str], rows: list[list[Any]], long: tuple[int, ...] = ()) -> str:
    """A table.

    Args:
        columns: headings; not shown if all are empty.
        rows: of cells.
        long: numbers of the columns whose text may go over several lines.
    """
    head = "".join(f"<th>{_text(column)}</th>" for column in columns) if any(columns) else ""
    head = f"<thead><tr>{head}</tr></thead>" if head else ""
    body = []
    for row in rows:
        kinds = [' class="long"' if place in long else "" for place in range(len(row))]
        cells = "".join(f"<td{kind}>{_text(str(cell))}</td>" for kind, cell in zip(kinds, row))
        body.append(f"<tr>{cells}</tr>")
    return f'<div class="scroll" tabindex="0"><table>{head}<tbody>{"".join(body)}</tbody></table></div>'


def document(title: str, lead: str, *sections: str) -> str:
    """The text of the page."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style></head>\n<body><header><h1>{_text(title)}</h1>'
        f'<p class="lead">{_text(lead)}</p></header>\n' + "\n".join(filter(None, sections)) + "\n</body></html>\n"
    )


def write_page(path: pathlib.Path, title: str, lead: str, *sections: str) -> None:
    """Writes the page atomically.

    Raises:
        UserError: the file cannot be written.
    """
    text = document(title, lead, *sections)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
