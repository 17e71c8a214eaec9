"""Draws the README's picture: accuracies over rounds, as mean and range over seeds.

    python benchmarks/plot.py runs/mnist/fedanchor runs/mnist/server_only --out=docs/images/mnist.png

Each argument is a folder with a run per seed, as written by `benchmarks/seeds.py` and sweeps. All must measure the same
set each round, the test set or validation images. Needs matplotlib.
"""

import argparse
import pathlib

import matplotlib.pyplot as plt
import numpy as np

from fedjax_ssl.records.groups import Group
from fedjax_ssl.records.runs import read_run

# Okabe and Ito's colours, distinct for every kind of colour vision.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
IN_USE, CLASSIFIER, SHARE = "pseudo_label_accuracy", "pseudo_label_accuracy_classification_head", "qualified_share"
TITLES = {
    IN_USE: "Pseudo-labels in use that are right",
    CLASSIFIER: "Labels by the classification head that are right",
    SHARE: "Qualified share of the clients' images",
}


def measure(group: Group, name: str) -> np.ndarray:
    """Percent [seeds, rounds]; a method with one head has one kind of labels."""
    return 100 * group.values(IN_USE if name == CLASSIFIER and not group.has(name) else name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--names", nargs="+", help="of the curves; without them the folders'")
    options = parser.parse_args()
    names = options.names or [folder.name.replace("_", " ") for folder in options.folders]
    if len(names) != len(options.folders):
        parser.error(f"{len(options.folders)} folders have {len(names)} names")
    groups = [
        Group(name, [read_run(path.parent) for path in sorted(folder.glob("*/metrics.jsonl"))])
        for name, folder in zip(names, options.folders)
    ]
    sets = {group.measured for group in groups}
    if len(sets) > 1:
        parser.error("some of the runs measure validation images each round, the others the test set")
    (measured,) = sets
    shown = {f"{measured}_accuracy": f"{measured.capitalize()} accuracy", **TITLES}
    curves = {name: [measure(group, name) for group in groups] for name in shown}
    accuracies = np.concatenate(
        [values.ravel() for name, of_groups in curves.items() if name != SHARE for values in of_groups]
    )
    lowest, highest = 10 * np.floor(np.nanmin(accuracies) / 10), 10 * np.ceil(np.nanmax(accuracies) / 10)
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(2, 2, figsize=(9, 5.6), sharex=True, layout="constrained")
    for axis, (name, title) in zip(axes.flat, shown.items()):
        for group, values, colour in zip(groups, curves[name], COLOURS):
            rounds = np.arange(1, values.shape[1] + 1)
            axis.plot(rounds, values.mean(axis=0), color=colour, label=group.name)
            axis.fill_between(rounds, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.2, linewidth=0)
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
        axis.set_ylim((0, 100) if name == SHARE else (lowest, highest))
    figure.supxlabel("Round")
    figure.supylabel("Percent")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=130)


if __name__ == "__main__":
    main()
