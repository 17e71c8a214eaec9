"""Which `augment.padding` of the random crop suits MNIST? Chosen on validation images.

    python launch.py sweep configs/sweeps/mnist_crop.py --workdir=runs/mnist_crop

Three methods: FedAvg on ten labels at each of 20 clients, as in mnist_few_labels.py; the server's 100 labels alone and
FixMatch with them, as in mnist_methods.py. Every padding has the same rows, rounds and seeds. There are 1,000
validation images.
"""

from fedjax_ssl.sweep import Sweep

AT_CLIENTS = {
    "num_clients": 20,
    "clients_per_round": 8,
    "data.labels": "clients",
    "data.labelled_share": 0.1,
    "client.epochs": 45,
}


def get_sweep():
    return Sweep(
        config="configs/fedanchor_mnist.py",
        common={"num_rounds": 40, "data.alpha": 0.1, "data.examples_per_client": 100, "data.validation": 1000},
        methods={
            "FedAvg, labels at clients": ("supervised", AT_CLIENTS),
            "Anchors only": "server_only,plain",
            "FixMatch": "fixmatch,plain",
        },
        fields={"augment.padding": (0, 1, 2, 4)},
        seeds=(0, 1, 2),
    )
