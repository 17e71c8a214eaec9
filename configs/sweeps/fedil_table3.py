"""FedIL's Table III: how many equal labels in a row it takes, k = 2 to 8, on CIFAR-10 (arXiv 2302.11823).

python launch.py sweep configs/sweeps/fedil_table3.py --workdir=runs/fedil_table3
"""

from fedjax_ssl.sweep import Sweep


def get_sweep():
    return Sweep(
        config="configs/fedil_cifar10.py",
        methods={"FedIL": ""},
        fields={"fedil.successive": (2, 3, 4, 5, 6, 7, 8)},
        target_accuracy=0.5,
    )
