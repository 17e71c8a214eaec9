"""With which settings does FedAnchor learn from its clients on CIFAR-10? Screened on held-out images, seed 7.

    python launch.py sweep configs/sweeps/cifar10_screen.py --workdir=runs/cifar10_screen

ResNet-8, 100 clients of 100 images, 10 a round, 500 anchors, 30 rounds, 2,000 validation images. `FOUND` is what
benchmarks/server_labels.py shows to be best before any client trains; the rows after the first change one thing of it.
The plan and what came of it: docs/results.md.
"""

from fedjax_ssl.sweep import Sweep

FOUND = {
    "server.pretrain_epochs": 40,
    "server.augmentation": "weak",
    "fedanchor.common_direction_weight": 1.0,
    "fedanchor.centred": True,
    "fedanchor.threshold_quantile": 0.25,
}
SERVER_ONLY = {"data.alpha": 1000.0}  # the clients' partition means nothing to it


def get_sweep():
    def found(**changes):
        return {**FOUND, **{name.replace("__", "."): value for name, value in changes.items()}}

    return Sweep(
        config="configs/fedanchor_cifar10.py",
        common={
            "model.name": "resnet8",
            "data.examples_per_client": 100,
            "data.validation": 2000,
            "client.clip_norm": 1.0,
            "num_rounds": 30,
        },
        methods={
            "Found": ("plain", FOUND),
            "Found, its server alone": (
                "plain,no_clients",
                {**FOUND, **SERVER_ONLY, "fedanchor.threshold_quantile": 0.0},
            ),
            "Strong recipe": ("strong", FOUND),
            "Strong recipe, its server alone": (
                "strong,no_clients",
                {**FOUND, **SERVER_ONLY, "fedanchor.threshold_quantile": 0.0},
            ),
            "Paper": "plain",
            "Fixed threshold 0.6": ("plain", found(fedanchor__threshold_quantile=0.0)),
            "Quantile 0.5": ("plain", found(fedanchor__threshold_quantile=0.5)),
            "No mixup": ("plain,no_mixup", FOUND),
            "One local epoch": ("plain", found(client__epochs=1)),
            "Server weak, five epochs before": ("plain", found(server__pretrain_epochs=5)),
        },
        fields={"data.alpha": (0.1, 1000.0)},
        seeds=(7,),
        target_accuracy=0.5,
    )
