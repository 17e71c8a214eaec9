"""Draws the README's picture: accuracies over rounds, the mean and the range over seeds.

    python benchmarks/plot.py runs/mnist/fedanchor runs/mnist/anchors_only --out=docs/images/mnist.png

Each argument is a folder of runs, one for each seed, as `benchmarks/seeds.py` leaves them. Needs matplotlib.
"""

import argparse
import json
import pathlib

import matplotlib.pyplot as plt
import numpy as np

# Okabe and Ito's colours: apart for every kind of colour vision.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
FIGURES = {
    "test_accuracy": "Test accuracy",
    "pseudo_label_accuracy_anchor_head": "Pseudo-labels by the anchor head",
    "pseudo_label_accuracy_classification_head": "Pseudo-labels by the classification head",
    "qualified_share": "Qualified share of the clients' images",
}


def read(folder: pathlib.Path, figure: str) -> np.ndarray:
    """[seeds, rounds], in percent."""
    runs = [path.read_text().splitlines() for path in sorted(folder.glob("*/metrics.jsonl"))]
    return 100 * np.array([[json.loads(line)[figure] for line in run] for run in runs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(2, 2, figsize=(9, 5.6), sharex=True, layout="constrained")
    for axis, (name, title) in zip(axes.flat, FIGURES.items()):
        for folder, colour in zip(options.folders, COLOURS):
            values = read(folder, name)
            rounds = np.arange(1, values.shape[1] + 1)
            axis.plot(rounds, values.mean(axis=0), color=colour, label=folder.name.replace("_", " "))
            axis.fill_between(rounds, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.2, linewidth=0)
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
        axis.set_ylim(0 if name == "qualified_share" else 50, 100)
    figure.supxlabel("Round")
    figure.supylabel("Percent")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=130)


if __name__ == "__main__":
    main()
