"""FedAnchor's Table 2: all methods on Wide-ResNet-28-2, CIFAR-10 with 250, 500 and 5,000 anchors (arXiv 2402.10191).

    python launch.py sweep configs/sweeps/fedanchor_table2.py --workdir=runs/table2

The paper's accuracies at Dir 0.1 with 250 anchors: Supervised 78.54, FedAvg+FixMatch 41.09, SemiFL 49.97,
FedAnchor 52.93, FedAnchor (mix) 55.26. Both recipes are run: see docs/methods.md for why.
"""

from fedjax_ssl.sweep import Sweep

METHODS = {"Supervised": "supervised", "FedAvg+FixMatch": "fixmatch", "SemiFL": "semifl", "FedAnchor": "fedanchor"}


def get_sweep():
    methods = {
        f"{name} ({recipe})": f"{words},{recipe}" for name, words in METHODS.items() for recipe in ("plain", "strong")
    }
    mixed = {f"FedAnchor (mix) ({recipe})": f"{recipe},mix" for recipe in ("plain", "strong")}
    return Sweep(
        config="configs/fedanchor_cifar10.py",
        methods={**methods, **mixed},
        common={"model.name": "wrn28_2"},
        fields={"data.alpha": (0.1, 1000.0), "data.num_anchors": (250, 500, 5000)},
        target_accuracy=0.5,
    )
