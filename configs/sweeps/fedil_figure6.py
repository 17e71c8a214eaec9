"""FedIL's Figure 6: local epochs, on CIFAR-10, 1,000 rounds (arXiv 2302.11823). 5 are best in the paper.

python launch.py sweep configs/sweeps/fedil_figure6.py --workdir=runs/fedil_figure6
"""

from fedjax_ssl.sweep import Sweep


def get_sweep():
    return Sweep(
        config="configs/fedil_cifar10.py",
        methods={"FedIL": ""},
        common={"num_rounds": 1000},
        fields={"client.epochs": (1, 2, 5, 10)},
        target_accuracy=0.5,
    )
