"""Which settings let FedAnchor learn from its clients on CIFAR-10? Chosen on validation images of seed 7.

    python launch.py sweep configs/sweeps/cifar10_screen.py --workdir=runs/cifar10_screen

ResNet-8, 100 clients of 100 images, 10 a round, 500 labelled images (anchors) at the server, 2,000 validation images.
The first rows ask in 12 rounds whether clients with all their labels improve the global model. FedAnchor's rows have 30
rounds. docs/results/server_cifar10.md has the results.

    python launch.py sweep configs/sweeps/cifar10_screen.py:cnn --workdir=runs/cifar10_cnn

What decides how much FedAnchor with the small CNN gains from its clients? Single changes of the committed
configuration, and the server alone for those that it sees; 20 clients, two local epochs, seeds 7, 8 and 9.
"""

from fedjax_ssl.sweep import Sweep, by_argument

# The settings whose labels were best before any client trained.
SERVER = {"server.pretrain_epochs": 40, "server.augmentation": "weak"}
FOUND = {**SERVER, "fedanchor.common_direction_weight": 1.0, "fedanchor.centred": True}
SLOW = {"server.learning_rate": 0.003, "fedanchor.contrastive_learning_rate": 0.003}
TWO_EPOCHS = {"server.augmentation": "weak", "server.epochs": 2, "server.pretrain_epochs": 80}
LDA, IID = {"data.alpha": 0.1}, {"data.alpha": 1000.0}


def share(part):
    return {"confidence.kind": "share", "confidence.share": part}


CHANGES = {
    "": {},
    ", ResNet-8": {"model.name": "resnet8"},
    ", no crop": {"augment.padding": 0},
    ", 2,500 labels": {"data.server_labels": 2500},
}
CLIENTS = {  # changes that its server alone does not see
    ", threshold 0.3": {"confidence.threshold": 0.3},
    ", threshold 0.8": {"confidence.threshold": 0.8},
    ", the surest 30 %": share(0.3),
}


def of_cnn():
    rows = {f"FedAnchor{name}": ("strong", fields) for name, fields in {**CHANGES, **CLIENTS}.items()}
    alone = {f"Server alone{name}": ("strong,no_clients", fields) for name, fields in CHANGES.items()}
    return Sweep(
        config="configs/fedanchor_cifar10.py",
        common={
            "model.name": "cnn",
            "num_clients": 20,
            "clients_per_round": 5,
            "client.epochs": 2,
            "data.examples_per_client": 100,
            "data.validation": 2000,
            "num_rounds": 20,
            "eval_every": 2,
            "log.report": False,
        },
        methods={**rows, **alone, "Labels alone": "server_only,strong"},
        seeds=(7, 8, 9),
    )


def get_sweep(board="resnet8"):
    return by_argument({"resnet8": of_resnet8, "cnn": of_cnn}, board)()


def of_resnet8():
    revealed = {**SERVER, "num_rounds": 12}
    slow = {**revealed, "server.learning_rate": 0.003}
    return Sweep(
        config="configs/fedanchor_cifar10.py:paper",
        common={
            "model.name": "resnet8",
            "data.examples_per_client": 100,
            "data.validation": 2000,
            "client.clip_norm": 1.0,
            "num_rounds": 30,
        },
        methods={
            "All labels": ("supervised,all_labels,plain", {**revealed, **IID}),
            "All labels, server clips": ("supervised,all_labels,plain", {**revealed, "server.clip_norm": 1.0, **IID}),
            "All labels, slow server": ("supervised,all_labels,plain", slow),
            "All labels, strong": ("supervised,all_labels,strong", {**revealed, **IID}),
            "Server alone": ("plain,no_clients", {**FOUND, **IID}),
            "Slow server alone": ("plain,no_clients", {**FOUND, **SLOW, **IID}),
            "Strong, server alone": ("strong,no_clients", {**FOUND, **IID}),
            "FedAnchor, strong, by share": ("strong", {**FOUND, **share(0.3)}),
            "FedAnchor, strong, share 0.2": ("strong", {**FOUND, **share(0.2), **LDA}),
            "FedAnchor, strong, share 0.1": ("strong", {**FOUND, **share(0.1), **LDA}),
            "FedAnchor, strong, 0.6": ("strong", {**SERVER, **LDA}),
            "Strong, server only": ("server_only,strong", {**TWO_EPOCHS, **IID}),
        },
        fields={"data.alpha": (0.1, 1000.0)},
        seeds=(7,),
        target_accuracy=0.5,
    )
