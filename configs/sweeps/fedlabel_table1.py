"""FedLabel's Table 1: labels of one expert or of both; CIFAR-10, Dir 0.1 (ICCV 2023, arXiv 2307.08809).

    python launch.py sweep configs/sweeps/fedlabel_table1.py --workdir=runs/fedlabel_table1

The paper's accuracies with labels for 20 % / 50 % of each client's images:
    only local         32.57 / 41.21
    only global        37.51 / 38.43
    global and local   44.51 / 50.53
"""

from fedjax_ssl.sweep import Sweep


def get_sweep():
    return Sweep(
        config="configs/fedlabel_cifar10.py",
        methods={"Only local": "only_local", "Only global": "only_global", "Global and local": ""},
        fields={"data.labelled_share": (0.2, 0.5)},
        target_accuracy=0.4,
    )
