"""Draws docs/images/methods.svg from the leaderboard's records in docs/leaderboard/.

    python docs/draw_results.py

A bar is the mean over five seeds of the mean test accuracy of the last five rounds, a line one standard deviation each
way. Every method had the same number of tries of its settings, on validation images.
"""

import csv
import pathlib
import statistics

DOCS = pathlib.Path(__file__).parent
WIDTH, TOP, ROW, PANEL, NAMES, BAR = 780, 58, 19, 252, 116, 92  # pixels; BAR is 100 %
PANELS = {
    "mnist_server": "MNIST, 100 labels at the server",
    "digits_clients": "Digits, a tenth at each client",
    "digits_some_clients": "Digits, all at 3 clients of 20",
}
COLOURS = {"All labels": "#b4bccb", "Labels alone": "#8a94a6"}  # the bounds; methods are blue
STYLE = """<title>Test accuracy of the methods, by where the labels are</title>
<style>
text { font-family: system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; }
text { font-size: 12.5px; fill: #1d2430; }
.title { font-size: 14px; font-weight: 600; }
</style>"""
NOTE = "Test accuracy in percent, mean of the last five rounds, five seeds; six tries a method on validation images"


def read_board(name: str) -> list[tuple[str, float, float]]:
    """(method, mean, standard deviation) of a board's rows, best first."""
    found: dict[str, list[float]] = {}
    with (DOCS / "leaderboard" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            of_rounds = [float(accuracy) for accuracy in line["accuracies"].split()]
            found.setdefault(line["method"], []).append(statistics.mean(of_rounds))
    rows = [(method, statistics.mean(values), statistics.stdev(values)) for method, values in found.items()]
    return sorted(rows, key=lambda row: -row[1])


def draw() -> str:
    """The picture."""
    boards = {board: read_board(board) for board in PANELS}
    height = TOP + ROW * max(map(len, boards.values())) + 30
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', STYLE]
    parts.append(f'<rect width="{WIDTH}" height="{height}" rx="12" fill="#fbfcfe"/>')
    for panel, (board, title) in enumerate(PANELS.items()):
        left = 12 + panel * (PANEL + 2)
        parts.append(f'<text class="title" x="{left + 6}" y="32">{title}</text>')
        for row, (name, mean, deviation) in enumerate(boards[board]):
            y, start = TOP + row * ROW, left + NAMES
            ends = [start + min(max(value, 0), 100) / 100 * BAR for value in (mean - deviation, mean, mean + deviation)]
            parts += [
                f'<text x="{start - 6}" y="{y + 4}" text-anchor="end">{name}</text>',
                f'<rect x="{start}" y="{y - 7}" width="{ends[1] - start:.1f}" height="14"'
                f' fill="{COLOURS.get(name, "#4a76c0")}"/>',
                f'<line x1="{ends[0]:.1f}" y1="{y}" x2="{ends[2]:.1f}" y2="{y}" stroke="#1d2430"/>',
                f'<text x="{start + BAR + 6}" y="{y + 4}">{mean:.1f}</text>',
            ]
    parts.append(f'<text x="18" y="{height - 14}">{NOTE}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    file = DOCS / "images" / "methods.svg"
    file.write_text(draw(), encoding="utf-8")
    print(file)
