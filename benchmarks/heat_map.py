"""Draws a sweep's table as heat maps: accuracies of aggregation rules under attacks, in docs/results/robustness.md.

    python benchmarks/heat_map.py runs/untrusted/attacks --grid=attack.share --out=docs/images/attacks.png

Rows of the table have names such as 'FedAnchor, median, noise': a panel for each first word, a row for each second
word, columns for each third word with the values of the grid's field, in the table's order. Cells of unfinished rows
are empty. Needs matplotlib.
"""

import argparse
import csv
import pathlib

import matplotlib.pyplot as plt
import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=pathlib.Path, help="its workdir")
    parser.add_argument("--grid", required=True, help="the field whose values are columns")
    parser.add_argument("--measure", default="test accuracy", help="a column of table.csv, in percent")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    with open(options.sweep / "table.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    named = {(*line["method"].split(", ", 2), line[options.grid]): line[options.measure] for line in lines}
    panels, rows = (list(dict.fromkeys(key[place] for key in named)) for place in range(2))
    columns = list(dict.fromkeys(key[2:] for key in named))
    plt.rcParams.update({"font.size": 8})
    size = (1.6 + 0.42 * len(columns), 0.6 + len(panels) * (0.9 + 0.3 * len(rows)))
    figure, axes = plt.subplots(len(panels), 1, figsize=size, sharex=True, squeeze=False, layout="constrained")
    for axis, panel in zip(axes[:, 0], panels):
        values = np.array([[float(named.get((panel, row, *column)) or "nan") for column in columns] for row in rows])
        image = axis.imshow(values, vmin=0, vmax=100, cmap="cividis", aspect="auto")
        for place, value in np.ndenumerate(values):
            if np.isfinite(value):
                colour = "black" if value > 55 else "white"
                axis.text(place[1], place[0], f"{value:.0f}", ha="center", va="center", color=colour)
        axis.set_title(f"{panel}: {options.measure}, percent", fontsize=9)
        axis.set_yticks(range(len(rows)), rows)
        axis.set_xticks(range(len(columns)), [f"{kind}, {100 * float(share):g} %" for kind, share in columns])
        axis.tick_params(axis="x", labelrotation=90)
    figure.colorbar(image, ax=axes, shrink=0.6)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=130)


if __name__ == "__main__":
    main()
