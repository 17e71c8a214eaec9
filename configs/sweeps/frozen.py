"""Does semi-supervised learning help, where a frozen encoder has been trained on ImageNet? Labels at the server.

    python launch.py sweep configs/sweeps/frozen.py:choose --workdir=runs/frozen_choose DATA
    python launch.py sweep configs/sweeps/frozen.py --workdir=runs/frozen DATA

DATA stands for --config.data.source=npz --config.data.path=FILE --config.data.flip=True
--config.encoder.weights=FILE. A linear head on the features of EfficientNet-Lite0; 40 clients of 80 images, 8 a round,
20 rounds. `choose` has 500 validation images, 40 labels, LDA 0.1 and seed 7: three learning rates, of clients and
server alike, for every method. The best of a method belongs into `CHOSEN`, which has the middle one until then. The
other part has 10, 40, 250 and 500 labels, LDA 0.1 and IID, seeds 0, 1 and 2.
"""

from fedjax_ssl.sweep import Sweep

RATES = (0.0003, 0.003, 0.03)
METHODS = {
    "labels alone": "server_only,plain",
    "FixMatch": "fixmatch,plain",
    "UDA": "uda,plain",
    "SemiFL": "semifl,plain",
    "(FL)^2": "fl2,plain",
    "FedAnchor": "fedanchor,plain",
}
CHOSEN = dict.fromkeys(METHODS, 0.003)
WITHOUT_CLIENTS = {"labels alone": {"data.alpha": 1000.0}}  # to which the clients' partition means nothing
COMMON = {
    "num_rounds": 20,
    "num_clients": 40,
    "clients_per_round": 8,
    "data.examples_per_client": 80,
    "model.normalisation": "none",
    "client.batch_size": 20,
    "client.epochs": 1,
    "log.report": False,
    "log.tensorboard": False,
}


def with_rate(name, rate):
    fields = ("client.learning_rate", "server.learning_rate", "server.pretrain_learning_rate")
    return METHODS[name], dict.fromkeys(fields, rate)


def get_sweep(part="compare"):
    config = "configs/cifar10_frozen.py"
    if part == "choose":
        rows = {f"{name}, {rate:g}": with_rate(name, rate) for name in METHODS for rate in RATES}
        chosen_by = {**COMMON, "data.validation": 500, "data.server_labels": 40, "data.alpha": 0.1}
        return Sweep(config, rows, (7,), common=chosen_by)
    rows = {}
    for name, rate in CHOSEN.items():
        arguments, fields = with_rate(name, rate)
        rows[name] = arguments, {**fields, **WITHOUT_CLIENTS.get(name, {})}
    fields = {"data.server_labels": (10, 40, 250, 500), "data.alpha": (0.1, 1000.0)}
    return Sweep(config, rows, (0, 1, 2), fields, COMMON)
