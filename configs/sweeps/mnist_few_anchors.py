"""10 and 40 labels at the server on MNIST: SemiFL against (FL)^2 and its parts.

    python launch.py sweep configs/sweeps/mnist_few_anchors.py --workdir=runs/mnist_few_anchors

The small CNN, 100 clients of 100 images, 10 a round, 40 rounds, 3 seeds; LDA 0.1 and IID; the recipe `strong`, five
epochs at the server in a round, and 50 before the first, as in (FL)^2's code. With so few labels some runs collapse:
look at each seed in table_runs.csv. `Anchors only` trains the server alone, so it runs with one partition.
"""

from fedjax_ssl.sweep import Sweep


def get_sweep():
    return Sweep(
        config="configs/fedanchor_mnist.py",
        common={
            "num_rounds": 40,
            "data.examples_per_client": 100,
            "server.epochs": 5,
            "server.pretrain_epochs": 50,
        },
        methods={
            "Anchors only": ("server_only,strong", {"data.alpha": 1000.0}),
            "SemiFL": "semifl,strong",
            "(FL)^2": "fl2,strong",
            "(FL)^2, no CAT": "fl2,strong,no_cat",
            "(FL)^2, no SACR": "fl2,strong,no_sacr",
            "(FL)^2, no LSAA": "fl2,strong,no_lsaa",
        },
        fields={"data.server_labels": (10, 40), "data.alpha": (0.1, 1000.0)},
        seeds=(0, 1, 2),
    )
