"""Reasons for the results on MNIST: rows of mnist_methods.py with one change each, seed 0.

    python launch.py sweep configs/sweeps/mnist_one_change.py --workdir=runs/mnist_one_change

docs/results/single_changes.md has the questions and the results.
"""

from fedjax_ssl.sweep import Sweep

LDA, IID = {"data.alpha": 0.1}, {"data.alpha": 1000.0}
EARLY = {"num_rounds": 15, "schedule": "constant", **IID}  # enough to see whether FixMatch collapses

FEDRGD = {"server.pretrain_epochs": 5, "fedrgd.steps": 50, "model.normalisation": "group"}


def get_sweep():
    return Sweep(
        config="configs/fedanchor_mnist.py",
        common={"num_rounds": 40, "data.examples_per_client": 100},
        methods={
            "FedAnchor, clients clip": ("plain", {"client.clip_norm": 1.0, **IID}),
            "FedAnchor, server clips": ("plain", {"server.clip_norm": 1.0, **IID}),
            "FedAnchor, static statistics": ("plain", {"model.normalisation": "static", **IID}),
            "FedAnchor, threshold by class": ("plain", {"confidence.kind": "sat", **LDA}),
            "Anchors only, two epochs": ("server_only,plain", {"server.epochs": 2, **IID}),
            "SemiFL, weights by accepted labels": ("semifl,plain", {"aggregation.weights": "qualified", **LDA}),
            "SemiFL (strong), statistics of one pool": (
                "semifl,strong",
                {"model.statistics": "all_mixed", **LDA},
            ),
            "FedIL, counts epochs": (
                "fedil,plain",
                {"server.pretrain_epochs": 5, "fedil.count_per": "epoch", **LDA},
            ),
            "FedRGD, 16 steps": ("plain,fedrgd", {**FEDRGD, "fedrgd.steps": 16, **LDA}),
            "FedRGD, clients clip": ("plain,fedrgd", {**FEDRGD, "client.clip_norm": 1.0, **LDA}),
            "FixMatch (strong), early": ("fixmatch,strong", EARLY),
            "FixMatch (strong), early, labels in evaluation mode": (
                "fixmatch,strong",
                {"fixmatch.label_mode": "eval", **EARLY},
            ),
            "FixMatch (strong), early, no clipping at the server": (
                "fixmatch,strong",
                {"server.clip_norm": 0.0, **EARLY},
            ),
            "FixMatch (strong), early, five epochs at the server": ("fixmatch,strong", {"server.epochs": 5, **EARLY}),
            "FixMatch (strong), early, no server momentum": (
                "fixmatch,strong",
                {"aggregation.optimizer": "fedavg", **EARLY},
            ),
            "FixMatch (strong), early, fresh optimizers": (
                "fixmatch,strong",
                {"client.persistent": False, "server.persistent": False, **EARLY},
            ),
            "FixMatch (strong), early, running statistics": (
                "fixmatch,strong",
                {"model.normalisation": "running", **EARLY},
            ),
        },
        fields={"data.alpha": (0.1, 1000.0)},
        seeds=(0,),
    )
