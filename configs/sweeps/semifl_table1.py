"""SemiFL's Table 1 on CIFAR-10: 250 and 4,000 labels, IID and Dirichlet (NeurIPS 2022, arXiv 2106.01432).

    python launch.py sweep configs/sweeps/semifl_table1.py --workdir=runs/semifl_table1

The paper's best accuracies of 800 rounds: SemiFL with 4,000 labels 93.1 (IID), 88.9 (Dir 0.3), 84.5 (Dir 0.1);
partially supervised 76.9; federated with all labels 94.3, 91.6, 85.0. The rows with 250 labels:
server.batch_size is 10 there.
"""

from fedjax_ssl.sweep import Sweep


def get_sweep():
    methods = {}
    for anchors in (250, 4000):
        methods |= {
            f"Partially supervised, {anchors}": (f"anchors_only,anchors={anchors}", {"data.alpha": 1000.0}),
            f"SemiFL, {anchors}": f"anchors={anchors}",
        }
    methods["FedAvg with all labels"] = "supervised,no_server"
    return Sweep(
        config="configs/semifl_cifar10.py",
        methods=methods,
        fields={"data.alpha": (1000.0, 0.3, 0.1)},
        seeds=(0, 1, 2, 3),
    )
