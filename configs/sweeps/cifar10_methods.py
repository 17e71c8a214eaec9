"""Does FedAnchor learn from its clients on CIFAR-10? Compared with its server alone, SemiFL and the paper's own rules.

    python launch.py sweep configs/sweeps/cifar10_methods.py --workdir=runs/cifar10_methods
    python launch.py sweep configs/sweeps/cifar10_methods.py:one_seed --workdir=runs/cifar10_one_seed

ResNet-8, 100 clients of 100 images, 10 a round, 500 labelled images (anchors) at the server, 100 rounds, 3 seeds, LDA
0.1 and IID, recipe `strong`. The settings were chosen on validation images of another seed (cifar10_screen.py): the
paper's threshold of 0.6, and, in an earlier choice, the surest 30 % of each client's images. The test set is used once,
after the last round. Every server trains on 1,000 images a round: FedAnchor's in one epoch of each of its two losses
(70 steps), the others' in two epochs of cross-entropy (100 steps). The second command has single changes and bounds,
with seed 0 and LDA 0.1.
"""

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.sweep import Sweep

SERVER = {"server.augmentation": "weak", "server.pretrain_epochs": 40}
WITHOUT_CLIENTS = {"data.alpha": 1000.0}
FOUND, SUREST = "strong,natural_images", "strong,natural_images,surest"
ITS_SERVER = f"{FOUND},no_clients"
TWO_EPOCHS = {**SERVER, "server.epochs": 2, "server.pretrain_epochs": 80}
FEWER = {"data.server_labels": 250}
METHODS = {
    "FedAnchor": FOUND,
    "FedAnchor, its server alone": (ITS_SERVER, WITHOUT_CLIENTS),
    "FedAnchor, the surest 30 %": SUREST,
    "The surest, its server alone": (f"{SUREST},no_clients", WITHOUT_CLIENTS),
    "SemiFL": ("semifl,strong", TWO_EPOCHS),
    "Anchors only": ("server_only,strong", {**TWO_EPOCHS, **WITHOUT_CLIENTS}),
}
ONE_SEED = {
    "FedAnchor, the paper's own": "",
    "FixMatch": ("fixmatch,strong", TWO_EPOCHS),
    "All labels": ("supervised,all_labels,strong", TWO_EPOCHS),
    "FedAnchor, 250 anchors": (FOUND, FEWER),
    "Its server alone, 250 anchors": (ITS_SERVER, {**FEWER, **WITHOUT_CLIENTS}),
}


def get_sweep(which="methods"):
    if which not in ("methods", "one_seed"):
        raise UserError(f"the sweep has no part {which!r}; known: methods, one_seed")
    return Sweep(
        config="configs/fedanchor_cifar10.py:paper",
        common={
            "model.name": "resnet8",
            "data.examples_per_client": 100,
            "data.validation": 2000,
            "num_rounds": 100,
            "snapshot_rounds": (1, 50),
        },
        methods=METHODS if which == "methods" else ONE_SEED,
        fields={"data.alpha": (0.1, 1000.0) if which == "methods" else (0.1,)},
        seeds=(0, 1, 2) if which == "methods" else (0,),
        target_accuracy=0.5,
    )
