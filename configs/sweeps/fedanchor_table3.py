"""FedAnchor's Table 3: where mixup is used, and what the contrastive loss does, at Dir 0.1 (arXiv 2402.10191).

    python launch.py sweep configs/sweeps/fedanchor_table3.py --workdir=runs/table3
    python launch.py sweep configs/sweeps/fedanchor_table3.py:svhn --workdir=runs/table3_svhn

Each row has the recipe `plain`, likely the paper's, and `strong`, that of configs/fedanchor_cifar10.py (see
fedanchor_table1.py).
The paper's accuracies:                           CIFAR-10, 500    SVHN, 1000
    Wide-ResNet-28-2  FedAvg+FixMatch                     53.29         83.39
                      SemiFL                              56.99         85.97
                      SemiFL, no mixup                    62.93         84.93
                      FedAnchor, client mixup             63.38         86.39
                      no mixup                            63.15         87.78
                      client and server mixup             64.96         86.96
                      server mixup                        66.07         86.09
    ResNet-18         SemiFL                              68.96         87.21
                      FedAnchor, no contrastive loss      70.90         88.13
                      FedAnchor                           72.75         90.20
"""

from fedjax_ssl.sweep import Sweep, by_argument

UPPER = {
    "Labels alone": "server_only",
    "FedAvg+FixMatch": "fixmatch",
    "SemiFL": "semifl",
    "SemiFL, no mixup": "semifl,no_mixup",
    "FedAnchor, client mixup": "fedanchor",
    "FedAnchor, no mixup": "fedanchor,no_mixup",
    "FedAnchor, client and server mixup": "fedanchor,mix",
    "FedAnchor, server mixup": "fedanchor,server_mixup",
}
LOWER = {
    "SemiFL, ResNet-18": "semifl",
    "FedAnchor without the contrastive loss, ResNet-18": "fedanchor,no_contrastive",
    "FedAnchor, ResNet-18": "fedanchor",
}
RECIPES = {"plain": "{},plain", "strong": "strong,natural_images,{}"}
# Number of anchors; target accuracy to which the table counts rounds.
DATASETS = {"cifar10": (500, 0.5), "svhn": (1000, 0.8)}


def get_sweep(dataset="cifar10"):
    anchors, target_accuracy = by_argument(DATASETS, dataset)
    backbones = (("wrn28_2", UPPER), ("resnet18", LOWER))
    rows = [(name, words, backbone) for backbone, part in backbones for name, words in part.items()]
    return Sweep(
        config=f"configs/fedanchor_{dataset}.py:paper",
        methods={
            f"{name} ({of})": f"{recipe.format(words)},{backbone}"
            for name, words, backbone in rows
            for of, recipe in RECIPES.items()
        },
        common={"data.alpha": 0.1, "data.server_labels": anchors},
        target_accuracy=target_accuracy,
    )
