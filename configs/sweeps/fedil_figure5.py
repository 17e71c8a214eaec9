"""FedIL's Figure 5: clients per round, on CIFAR-10, 1,000 rounds (arXiv 2302.11823). 5 to 20 help, more do not.

python launch.py sweep configs/sweeps/fedil_figure5.py --workdir=runs/fedil_figure5
"""

from fedjax_ssl.sweep import Sweep


def get_sweep():
    return Sweep(
        config="configs/fedil_cifar10.py",
        methods={"FedIL": ""},
        common={"num_rounds": 1000},
        fields={"clients_per_round": (5, 10, 20, 50)},
        target_accuracy=0.5,
    )
