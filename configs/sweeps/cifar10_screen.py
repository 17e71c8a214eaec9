"""With which settings does FedAnchor learn from its clients on CIFAR-10? Screened on held-out images, seed 7.

    python launch.py sweep configs/sweeps/cifar10_screen.py --workdir=runs/cifar10_screen

ResNet-8, 100 clients of 100 images, 10 a round, 500 anchors, 30 rounds, 2,000 validation images. `FOUND` is what
benchmarks/server_labels.py shows to be best before any client trains; the rows after the first change one thing of it.
The plan and what came of it: docs/results.md.
"""

from fedjax_ssl.sweep import Sweep

# Five epochs leave the server at 20 %, strong views of 500 anchors cost it ten points, and at 0.03 its epochs undo what
# the clients learned, even from the true labels.
AT_SERVER = {
    "server.pretrain_epochs": 40,
    "server.augmentation": "weak",
    "server.learning_rate": 0.003,
    "fedanchor.contrastive_learning_rate": 0.003,
}
FOUND = {
    **AT_SERVER,
    "fedanchor.common_direction_weight": 1.0,
    "fedanchor.centred": True,
    "fedanchor.threshold_quantile": 0.5,
}
CLIPS = {"server.learning_rate": 0.03, "fedanchor.contrastive_learning_rate": 0.03}  # a server that clips can be fast
ALONE = {**FOUND, "fedanchor.threshold_quantile": 0.0, "data.alpha": 1000.0}  # a partition means nothing to it


def get_sweep():
    def found(**changes):
        return {**FOUND, **{name.replace("__", "."): value for name, value in changes.items()}}

    def share(part):
        return {"threshold.kind": "share", "threshold.share": part, "fedanchor.threshold_quantile": 0.0}

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
            "Server alone": ("plain,no_clients", ALONE),
            "Found": ("plain", FOUND),
            "Strong recipe": ("strong", {**FOUND, **CLIPS}),
            "Strong recipe, share 0.3": ("strong", {**FOUND, **CLIPS, **share(0.3)}),
            "Strong recipe, server alone": ("strong,no_clients", {**ALONE, **CLIPS}),
            "Fixed threshold 0.6": ("plain", AT_SERVER),
            "SemiFL": ("semifl,plain", {name: AT_SERVER[name] for name in AT_SERVER if name.startswith("server")}),
            "Quantile 0.75": ("plain", found(fedanchor__threshold_quantile=0.75)),
            "Quantile 0.25": ("plain", found(fedanchor__threshold_quantile=0.25)),
            "No mixup": ("plain,no_mixup", FOUND),
            "Paper": "plain",
        },
        fields={"data.alpha": (0.1, 1000.0)},
        seeds=(7,),
        target_accuracy=0.5,
    )
