"""FedIL's Table II: FedIL without single modules, on CIFAR-10, label rate 0.01, IID (arXiv 2302.11823).

    python launch.py sweep configs/sweeps/fedil_table2.py --workdir=runs/fedil_table2

The paper's accuracies: FedIL 61.31, without the pseudo-label set 60.77, without cosine similarity 28.59,
without both 27.21.
"""

from fedjax_ssl.sweep import Sweep


def get_sweep():
    return Sweep(
        config="configs/fedil_cifar10.py",
        methods={
            "FedIL": "",
            "without pseudo-label set": "no_label_set",
            "without cosine similarity": "no_cosine",
            "without both": "plain_fedil",
        },
        target_accuracy=0.5,
    )
