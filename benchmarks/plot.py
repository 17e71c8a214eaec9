"""Draws the README's picture: accuracies over rounds, the mean and the range over seeds.

    python benchmarks/plot.py runs/mnist/fedanchor runs/mnist/anchors_only --out=docs/images/mnist.png

Each argument is a folder of runs, one for each seed, as `benchmarks/seeds.py` leaves them; all must measure the same
set each round, the test set or validation images. Needs matplotlib.
"""

import argparse
import pathlib

import matplotlib.pyplot as plt
import numpy as np

from fedjax_ssl.records.runs import Group, read_run

# Okabe and Ito's colours: apart for every kind of colour vision.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
FIGURES = {
    "pseudo_label_accuracy_anchor_head": "Pseudo-labels by the anchor head",
    "pseudo_label_accuracy_classification_head": "Pseudo-labels by the classification head",
    "qualified_share": "Qualified share of the clients' images",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    groups = [
        Group(folder.name.replace("_", " "), [read_run(path.parent) for path in sorted(folder.glob("*/metrics.jsonl"))])
        for folder in options.folders
    ]
    sets = {group.measured for group in groups}
    if len(sets) > 1:
        parser.error("some of the runs measure validation images each round, the others the test set")
    (measured,) = sets
    shown = {f"{measured}_accuracy": f"{measured.capitalize()} accuracy", **FIGURES}
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(2, 2, figsize=(9, 5.6), sharex=True, layout="constrained")
    for axis, (name, title) in zip(axes.flat, shown.items()):
        for group, colour in zip(groups, COLOURS):
            values = 100 * group.values(name)
            rounds = np.arange(1, values.shape[1] + 1)
            axis.plot(rounds, values.mean(axis=0), color=colour, label=group.name)
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
