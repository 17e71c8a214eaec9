"""FedAnchor's Table 1: all methods on ResNet-18, CIFAR-10 with 250, 500 and 5,000 anchors (arXiv 2402.10191).

    python launch.py sweep configs/sweeps/fedanchor_table1.py --workdir=runs/table1

CIFAR-100 and SVHN are the same with `--config.data...` of configs/fedanchor_cifar100.py and fedanchor_svhn.py
in place of `config` below. The paper's recipe is not known; `plain` is the likely one (docs/methods.md).
FedCon's row is not there yet. The paper's accuracies, CIFAR-10 at Dir 0.1 / IID with 500 anchors: Supervised
77.96 / 89.73, FedAvg+FixMatch 49.92 / 49.18, SemiFL 68.96 / 81.19.
"""

from fedjax_ssl.sweep import Sweep

METHODS = {
    "Supervised": "supervised,plain",
    "FedAvg+FixMatch": "fixmatch,plain",
    "SemiFL": "semifl,plain",
    "FedAnchor": "plain",
    "FedAnchor (mix)": "plain,mix",
}


def get_sweep():
    return Sweep(
        config="configs/fedanchor_cifar10.py",
        methods=METHODS,
        fields={"data.alpha": (0.1, 1000.0), "data.num_anchors": (250, 500, 5000)},
        target_accuracy=0.7,
    )
