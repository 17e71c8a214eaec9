"""Draws docs/images/methods.svg: the methods of docs/results.md on MNIST, for each place of the labels.

    python docs/draw_results.py

The figures are those of the page's table. A bar is the mean over three seeds, a line one standard deviation each way.
"""

import pathlib
import re

DOCS = pathlib.Path(__file__).parent
WIDTH, HEIGHT, TOP, ROW, PANEL, NAMES, BAR = 780, 450, 58, 21, 252, 116, 92  # pixels; BAR is 100 %
PANELS = (("A", "100 labels at the server"), ("C", "10 labels at every client"), ("D", "All labels at one of ten"))
COLOURS = {"all labels": "#b4bccb", "labels alone": "#8a94a6"}  # the bounds; methods are blue
STYLE = """<title>Test accuracy of the methods on MNIST, by where the labels are</title>
<style>
text { font-family: system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; }
text { font-size: 12.5px; fill: #1d2430; }
.title { font-size: 15px; font-weight: 600; }
</style>"""


def read_column(page: str, column: str) -> list[tuple[str, float, float]]:
    """(method, mean, standard deviation) of the rows of the page's large table that have a figure, best first."""
    table = page[page.index("| method | A: ") :].partition("\n\n")[0].splitlines()
    place = [cell.strip().partition(":")[0] for cell in table[0].split("|")].index(column)
    found = []
    for line in table[2:]:
        cells = [cell.strip() for cell in line.split("|")]
        if figure := re.match(r"([\d.]+)\s±\s([\d.]+)", cells[place]):
            name = re.sub(r"[*`]|the (?=labels)", "", cells[1]).strip()
            found.append((name + "*" * cells[place].endswith("*"), float(figure[1]), float(figure[2])))
    return sorted(found, key=lambda row: -row[1])


def draw() -> str:
    """The picture."""
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', STYLE]
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#fbfcfe"/>')
    for panel, (column, title) in enumerate(PANELS):
        left = 12 + panel * (PANEL + 2)
        parts.append(f'<text class="title" x="{left + 6}" y="32">{title}</text>')
        for row, (name, mean, deviation) in enumerate(read_column(page, column)):
            y, start = TOP + row * ROW, left + NAMES
            ends = [start + min(max(value, 0), 100) / 100 * BAR for value in (mean - deviation, mean, mean + deviation)]
            fill = COLOURS.get(name, "#4a76c0")
            parts += [
                f'<text x="{start - 6}" y="{y + 4}" text-anchor="end">{name}</text>',
                f'<rect x="{start}" y="{y - 7}" width="{ends[1] - start:.1f}" height="14" fill="{fill}"/>',
                f'<line x1="{ends[0]:.1f}" y1="{y}" x2="{ends[2]:.1f}" y2="{y}" stroke="#1d2430"/>',
                f'<text x="{start + BAR + 6}" y="{y + 4}">{mean}</text>',
            ]
    note = "MNIST, test accuracy in percent after the last round (right: last five), three seeds; * older code"
    parts.append(f'<text x="18" y="{HEIGHT - 14}">{note}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    file = DOCS / "images" / "methods.svg"
    file.write_text(draw(), encoding="utf-8")
    print(file)
