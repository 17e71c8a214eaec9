"""All methods on MNIST, on the same partitions, anchors, model and seeds.

    python launch.py sweep configs/sweeps/mnist_methods.py --workdir=runs/mnist_methods

The small CNN, 100 clients of 100 images, 10 a round, 100 anchors, 40 rounds, 3 seeds; LDA 0.1 and IID. Every
method under the recipe `plain`; FedAnchor, SemiFL and FixMatch under `strong`, too; FedAnchor with a threshold
that adapts. All start from the same five epochs on the anchors, FedIL too, whose paper has no pre-training. To three
rows the clients' partition means nothing; they are run once.
"""

from fedjax_ssl.sweep import Sweep

WITHOUT_CLIENTS = {"data.alpha": 1000.0}


def get_sweep():
    return Sweep(
        config="configs/fedanchor_mnist.py",
        common={"num_rounds": 40, "data.examples_per_client": 100},
        methods={
            "Centralised supervised": ("centralised,plain", WITHOUT_CLIENTS),
            "Supervised FedAvg": "supervised,all_labels,plain",
            "Anchors only": ("anchors_only,plain", WITHOUT_CLIENTS),
            "FixMatch": "fixmatch,plain",
            "FixMatch (strong)": "fixmatch,strong",
            "SemiFL": "semifl,plain",
            "SemiFL (strong)": "semifl,strong",
            "FedIL": ("fedil,plain", {"server.pretrain_epochs": 5}),
            "FedAnchor": "plain",
            "FedAnchor, its server alone": ("plain,no_clients", WITHOUT_CLIENTS),
            "FedAnchor (strong)": "strong",
            "FedAnchor, threshold by client": ("plain", {"threshold.kind": "client_mean"}),
        },
        fields={"data.alpha": (0.1, 1000.0)},
        seeds=(0, 1, 2),
    )
