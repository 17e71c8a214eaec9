"""FedAnchor's Table 2: all methods on Wide-ResNet-28-2, at Dir 0.1 and IID (arXiv 2402.10191).

    python launch.py sweep configs/sweeps/fedanchor_table2.py --workdir=runs/table2
    python launch.py sweep configs/sweeps/fedanchor_table2.py:cifar100 --workdir=runs/table2_cifar100
    python launch.py sweep configs/sweeps/fedanchor_table2.py:svhn --workdir=runs/table2_svhn

All rows but FedCon's have both recipes (docs/concepts/recipes.md says why). FedCon has the optimizers of its own code.
The paper's accuracies at Dir 0.1:
                       CIFAR-10, 250    CIFAR-100, 2500    SVHN, 250
    Supervised                 78.54              55.87        87.34
    FedCon                     41.11              30.27        57.98
    FedAvg+FixMatch            41.09              32.01        52.96
    SemiFL                     49.97              38.26        61.87
    FedAnchor                  52.93              40.89        63.81
    FedAnchor (mix)            55.26              42.25        48.56
"""

from fedjax_ssl.sweep import Sweep, by_argument

METHODS = {
    "Supervised": "supervised,all_labels",
    "Labels alone": "server_only",
    "FedAvg+FixMatch": "fixmatch",
    "SemiFL": "semifl",
    "FedAnchor": "fedanchor",
    "FedAnchor (mix)": "fedanchor,mix",
}
RECIPES = {"plain": "{},plain", "strong": "strong,natural_images,{}"}
# Numbers of anchors; target accuracy to which the table counts rounds.
DATASETS = {
    "cifar10": ((250, 500, 5000), 0.5),
    "cifar100": ((2500, 10000), 0.4),
    "svhn": ((250, 1000), 0.6),
}


def get_sweep(dataset="cifar10"):
    anchors, target_accuracy = by_argument(DATASETS, dataset)
    methods = {
        f"{name} ({of})": recipe.format(words) for name, words in METHODS.items() for of, recipe in RECIPES.items()
    }
    return Sweep(
        config=f"configs/fedanchor_{dataset}.py:paper",
        methods={**methods, "FedCon": "fedcon,plain,own_optimisers"},
        common={"model.name": "wrn28_2"},
        fields={"data.alpha": (0.1, 1000.0), "data.server_labels": anchors},
        target_accuracy=target_accuracy,
    )
