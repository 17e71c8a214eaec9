"""FedIL's Table I on CIFAR-10: IID and 2 classes for each client, label rates 0.01 and 0.1 (arXiv 2302.11823).

    python launch.py sweep configs/sweeps/fedil_table1.py --workdir=runs/fedil_table1

The paper's accuracies: Fully-Supervised 93.59; FedIL IID 61.31 / 82.51, non-IID 58.98 / 79.14. FedMatch, FedU,
FedEMA and Orchestra are not there yet. MNIST is the same with configs/fedil_mnist.py.
"""

from fedjax_ssl.sweep import Sweep


def get_sweep():
    return Sweep(
        config="configs/fedil_cifar10.py",
        methods={
            "Fully supervised": ("centralised", {"data.partition": "iid", "data.num_anchors": 500}),
            "FixMatch": "fixmatch",
            "FedIL": "",
        },
        fields={"data.partition": ("iid", "shards"), "data.num_anchors": (500, 5000)},
        target_accuracy=0.5,
    )
