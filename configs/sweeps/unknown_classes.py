"""What happens if clients hold images of unknown classes? Methods with labels at the server, on digits or MNIST.

    python launch.py sweep configs/sweeps/unknown_classes.py:digits --workdir=runs/unknown/digits
    python launch.py sweep configs/sweeps/unknown_classes.py:mnist --workdir=runs/unknown/mnist

The model knows the digits 0 to 6, of which the server has 10 labels each; 7, 8 and 9 are unknown. Clients hold 40
images of known digits (on MNIST 100), the same in all rows, and unknown ones so that these are 0, 25 or 50 % of their
images. The small CNN, 5 of 10 clients a round (MNIST: of 20), 2 local epochs, 10 rounds (MNIST: 15), IID, recipe
`plain`, 3 seeds. Each method has a row with its paper's threshold and one that takes every pseudo-label; FedOpenMatch's
one-vs-all head rejects images in both. Labels alone at the server do not depend on the clients and run once. The
results are in docs/results/unknown_classes.md.
"""

from fedjax_ssl.sweep import Sweep, by_argument

DATASETS = {
    "digits": (
        "configs/quickstart.py",
        {"num_rounds": 10, "num_clients": 10, "data.examples_per_client": 40},
    ),
    "mnist": (
        "configs/fedanchor_mnist.py",
        {"num_rounds": 15, "num_clients": 20, "data.examples_per_client": 100},
    ),
}
WITH, WITHOUT = "with a threshold", "every label"
METHODS = {
    "FixMatch": ("fixmatch,plain", {"confidence.threshold": 0.0}),
    "SemiFL": ("semifl,plain", {"confidence.threshold": 0.0}),
    "FedAnchor": ("plain", {"confidence.threshold": -1.0}),
    "(FL)^2": ("fl2,plain", {"confidence.threshold": 0.0, "confidence.kind": "fixed"}),
    "FedIL": ("fedil,plain", {"confidence.threshold": 0.0}),
    "FedOpenMatch": ("fedopenmatch,plain", {"confidence.threshold": 0.0}),
}


def get_sweep(dataset="digits"):
    config, fields = by_argument(DATASETS, dataset)
    rows = {f"{WITH}, labels alone, unknown": ("server_only,plain", {"data.unknown_share": 0.0})}
    for name, (words, every) in METHODS.items():
        rows |= {f"{WITH}, {name}, unknown": words, f"{WITHOUT}, {name}, unknown": (words, every)}
    return Sweep(
        config=config,
        common={
            "clients_per_round": 5,
            "client.epochs": 2,
            "server.pretrain_epochs": 5,
            "data.alpha": 1000.0,
            "data.server_labels": 70,
            "data.unknown_classes": (7, 8, 9),
            **fields,
        },
        methods=rows,
        fields={"data.unknown_share": (0.0, 0.25, 0.5)},
        seeds=(0, 1, 2),
    )
