"""How the report's pictures look: sizes, colours, and SVG that takes the page's text colour."""

import contextlib
import html
import io
import pathlib
import re
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedjax_ssl.errors import printable
from fedjax_ssl.files import make_folder, replaced

# Okabe and Ito's colours, which every kind of colour vision tells apart; without their yellow and black, which
# vanish on white and on black. Line styles tell the curves apart once the colours are used up.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
CLASS_COLOURS = (
    "#CC6677", "#332288", "#DDCC77", "#117733", "#88CCEE", "#882255", "#44AA99", "#999933", "#AA4499", "#888888",
)  # fmt: skip
LINES = ("-", "--", ":", "-.")
INK = "#262626"  # everything but data; the page replaces it by its text colour
COUNTS = "cividis"  # of heat maps: it grows as evenly in grey as in colour
NONE = "#d0d0d0"  # of their empty cells

# Small figures with large letters: one column of a wide page, the whole of a narrow one.
SMALL = (4.8, 3.2)
WIDE = (9.6, 3.2)
DPI = 150
KINDS = ("png", "svg")  # of a picture's files

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "grid.color": INK,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "figure.constrained_layout.use": True,
    "text.parse_math": False,  # a dollar sign in a class's name is one
    "svg.fonttype": "path",  # letters as outlines: nothing moves if the reader has other fonts
    "pdf.fonttype": 42,  # letters as letters of TrueType fonts, which journals ask for
    "svg.hashsalt": "fedjax_ssl",  # the same picture gives the same file
}


def curve_style(number: int) -> dict[str, Any]:
    """Colour and line of a picture's curve number 0, 1, 2, ..."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": LINES[number // len(COLOURS) % len(LINES)],
    }


def styled() -> contextlib.AbstractContextManager[None]:
    """Only figures that are made inside have the report's style."""
    return matplotlib.rc_context(_STYLE)


def subplots(rows: int = 1, columns: int = 1, figsize: tuple[float, float] = SMALL, **grid: Any) -> tuple[Figure, Any]:
    """A figure and its axes, without pyplot: no window, and a notebook's pictures are not touched."""
    figure = Figure(figsize=figsize)
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, **grid)


def save(figure: Figure, folder: pathlib.Path, name: str, title: str, kinds: tuple[str, ...] = KINDS) -> str:
    """Writes FOLDER/NAME.KIND of each kind, on white.

    Args:
        figure: what is written.
        folder: made if it is not there.
        name: of the files.
        title: of the element, for those who cannot see it.
        kinds: endings of files.

    Returns:
        The figure as an element for a page: no background, and text in the page's colour.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)  # of a page elsewhere
    make_folder(folder)
    svg = _drawing(figure)  # drawing is what takes the time: the file and the page have one
    for kind in kinds:
        with replaced(folder / f"{name}.{kind}") as file:
            if kind == "svg":
                white = '<rect width="100%" height="100%" fill="#ffffff"/>'
                file.write(svg.replace("<g id=", f"{white}\n <g id=", 1).encode())
            else:
                metadata = {"CreationDate": None} if kind == "pdf" else None
                figure.savefig(file, format=kind, dpi=DPI, facecolor="white", metadata=metadata)
    return _inline(svg, title)


def inline(figure: Figure, title: str) -> str:
    """The figure as an element for a page, as `save` returns it, without a file."""
    return _inline(_drawing(figure), title)


def _drawing(figure: Figure) -> str:
    """The text of an SVG file, the same each time."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # its parts have found their places, which are those of every kind
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg", dpi=DPI, transparent=True, metadata={"Date": None})
    return drawing.getvalue()


def _inline(svg: str, title: str) -> str:
    """The text of an SVG file as an element for a page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(INK, "currentColor")
    # The page decides its size; the viewBox keeps its shape.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(printable(title))}"', 1)
