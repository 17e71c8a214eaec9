"""How the report's pictures look: sizes, colours, and SVG that takes the page's text colour."""

import contextlib
import contextvars
import functools
import html
import io
import pathlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import matplotlib
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedjax_ssl.base.errors import printable, say
from fedjax_ssl.base.files import replaced

# Okabe and Ito's colours, which every kind of colour vision can distinguish; without their yellow and black, which
# vanish on white and on black. More curves than colours also differ in line style.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
CLASS_COLOURS = (  # Tol's muted scheme, which every kind of colour vision can distinguish, and grey
    "#CC6677", "#332288", "#DDCC77", "#117733", "#88CCEE", "#882255", "#44AA99", "#999933", "#AA4499", "#888888",
)  # fmt: skip
LINES = ("-", "--", ":", "-.")
INK = "#262626"  # everything except data; the page replaces it by its text colour
COUNTS = "cividis"  # of heat maps: even in colour and in grey
NONE = "#d0d0d0"  # of their empty cells

# Inches. Small figures with large letters fill one column of a wide page, or a narrow page.
SMALL = (4.8, 3.2)
WIDE = (9.6, 3.2)
DPI = 150
KINDS = ("png", "svg")  # file formats of a picture; papers also get PDF, which takes half as long again
FONTS = ("Noto Sans CJK SC", "Noto Sans Devanagari", "Noto Sans Thai", "Noto Sans Arabic")  # beside Matplotlib's own
SCREEN = "screen"
# Widths in inches of a picture and of a wide picture in a paper: those of ICML, which also fit IEEE and NeurIPS.
PAPER = {"column": (3.25, 6.75), "page": (6.75, 6.75)}
SIZES = (SCREEN, *PAPER)
_SIZE = contextvars.ContextVar("size", default=SCREEN)

_STYLE: dict[Any, Any] = {
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 9),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.12,
    "grid.linewidth": 0.6,
    **dict.fromkeys(
        ("grid.color", "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    ),
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "figure.constrained_layout.use": True,
    "text.parse_math": False,  # a dollar sign in a class name is not markup
    "svg.fonttype": "path",  # letters as outlines, so that the reader's fonts do not matter
    "pdf.fonttype": 42,  # TrueType fonts, which journals require
    "svg.hashsalt": "fedjax_ssl",  # the same picture gives the same file
}


_PAPER_STYLE: dict[Any, Any] = {
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 8),
    "legend.fontsize": 7,
    "lines.linewidth": 1.2,
}


def curve_style(number: int) -> dict[str, Any]:
    """Colour and line style of curve 0, 1, 2, ... of a picture."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": LINES[number // len(COLOURS) % len(LINES)]}


@contextlib.contextmanager
def styled(size: str = SCREEN) -> Iterator[None]:
    """A context in which figures have the report's style, for one of `SIZES`; pictures for papers are smaller."""
    token = _SIZE.set(size)
    try:
        with matplotlib.rc_context(_STYLE | {"font.family": _fonts()} | (_PAPER_STYLE if size in PAPER else {})):
            yield
    finally:
        _SIZE.reset(token)


def subplots(
    rows: int = 1, columns: int = 1, figsize: tuple[float, float] = SMALL, mosaic: Any = None, **grid: Any
) -> tuple[Figure, Any]:
    """A figure and its axes, made without pyplot: it opens no window and does not affect a notebook's figures.

    Rows, columns and `grid` are those of `Figure.subplots`, or `mosaic` and `grid` those of `Figure.subplot_mosaic`;
    `figsize` are inches on a screen.
    """
    width, height = figsize
    if _SIZE.get() in PAPER:
        narrow, wide = PAPER[_SIZE.get()]
        room = wide if width > SMALL[0] else narrow
        width, height = room, height * min(1, room / width)
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, **grid) if mosaic is None else figure.subplot_mosaic(mosaic, **grid)


def save(figure: Figure, folder: pathlib.Path, name: str, pdf: bool = False) -> str:
    """Writes FOLDER/NAME.KIND for each of `KINDS`, on white; with `pdf` or a size for papers also NAME.pdf.

    Returns an <svg> element for a page, without background, with text in the page's colour.
    """
    folder.mkdir(exist_ok=True)
    with warnings.catch_warnings(record=True) as caught:
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # all files have the layout of this drawing
        drawing = io.StringIO()  # drawing is slow, so the file and the page share it
        figure.savefig(drawing, format="svg", dpi=DPI, transparent=True, metadata={"Date": None})
        svg = drawing.getvalue()
        for kind in (*KINDS, "pdf") if pdf or _SIZE.get() in PAPER else KINDS:
            with replaced(folder / f"{name}.{kind}") as file:
                if kind == "svg":
                    white = '<rect width="100%" height="100%" fill="#ffffff"/>'
                    file.write(svg.replace("<g id=", f"{white}\n <g id=", 1).encode())
                else:
                    metadata = {"CreationDate": None} if kind == "pdf" else None
                    figure.savefig(file, format=kind, dpi=DPI, facecolor="white", metadata=metadata)
    for each in caught:
        if "missing from font" in str(each.message):
            _tell_of_letters()
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return _inline(svg, name.replace("_", " ").capitalize())


@functools.cache  # once
def _tell_of_letters() -> None:
    say(f"pictures have boxes for letters that no font here has; install one of {', '.join(FONTS)}")


@functools.cache
def _fonts() -> list[str]:
    """Matplotlib's own font, then installed ones with the letters that it lacks."""
    return ["DejaVu Sans", *sorted(set(FONTS) & set(font_manager.get_font_names()), key=FONTS.index)]


def _inline(svg: str, name: str) -> str:
    """Turns the text of an SVG file into an element for a page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(INK, "currentColor")
    # The page decides its size; the viewBox keeps its shape.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(printable(name))}"', 1)
