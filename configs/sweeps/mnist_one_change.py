"""Why the comparison on MNIST comes out as it does: rows of mnist_methods.py with one change each, seed 0.

    python launch.py sweep configs/sweeps/mnist_one_change.py --workdir=runs/mnist_one_change

What each is for, and what it said: docs/results.md.
"""

from fedjax_ssl.sweep import Sweep

LDA, IID = {"data.alpha": 0.1}, {"data.alpha": 1000.0}


def get_sweep():
    return Sweep(
        config="configs/fedanchor_mnist.py",
        common={"num_rounds": 40, "data.examples_per_client": 100},
        methods={
            "FedAnchor, clients clip": ("plain", {"client.clip_norm": 1.0, **IID}),
            "FedAnchor, server clips": ("plain", {"server.clip_norm": 1.0, **IID}),
            "FedAnchor, static statistics": ("plain", {"model.normalisation": "static", **IID}),
            "SemiFL, weights by accepted labels": ("semifl,plain", {"aggregation.weights": "qualified", **LDA}),
            "FedIL, counts epochs": (
                "fedil,plain",
                {"server.pretrain_epochs": 5, "fedil.count_per": "epoch", **LDA},
            ),
            "FixMatch (strong), labels in evaluation mode": (
                "fixmatch,strong",
                {"fixmatch.label_mode": "eval", **LDA},
            ),
            "FedAnchor, threshold by class": ("plain", {"threshold.kind": "sat", **LDA}),
        },
        fields={"data.alpha": (0.1, 1000.0)},
        seeds=(0,),
    )
