"""Does semi-supervised learning help on features of a frozen encoder that was trained on ImageNet?

    python launch.py sweep configs/sweeps/frozen.py:server_choose --workdir=runs/frozen_server_choose DATA
    python launch.py sweep configs/sweeps/frozen.py:server --workdir=runs/frozen_server DATA
    python launch.py sweep configs/sweeps/frozen.py:mnist_server --workdir=runs/frozen_mnist_server DATA
    python launch.py sweep configs/sweeps/frozen.py:clients_choose --workdir=runs/frozen_clients_choose DATA
    python launch.py sweep configs/sweeps/frozen.py:clients --workdir=runs/frozen_clients DATA
    python launch.py sweep configs/sweeps/frozen.py:mnist_clients --workdir=runs/frozen_mnist_clients DATA
    python launch.py sweep configs/sweeps/frozen.py:scratch --workdir=runs/frozen_scratch DATA

DATA stands for --config.data.source=npz --config.data.path=FILE --config.data.flip=True --config.encoder.weights=FILE.
MNIST takes no flip, `scratch` no weights.
A linear head on the features of EfficientNet-Lite0; 40 clients of 80 images, 8 a round, 20 rounds; labels at the server
or at the clients. The parts that end in `choose` try four learning rates, the same for clients and server, for every
method: 500 validation images, 40 labels, LDA 0.1, seed 7. `CHOSEN` has each method's best; `mnist_server` and
`mnist_clients` use the best on MNIST. The comparison has 10 (only at the server, because each of 40 clients has one),
40, 250 and 500 labels (at the clients 240 and 480, because LDA leaves out a remainder), LDA 0.1 and IID, seeds 0, 1
and 2.
`scratch` trains the small CNN on the images with the recipe `strong` for 100 rounds, which cost about as much as
encoding the images once.
"""

from fedjax_ssl.sweep import Sweep, by_argument

RATES = (0.0003, 0.003, 0.03, 0.3)
SERVER = {
    "labels alone": "server_only,plain",
    "FixMatch": "fixmatch,plain",
    "UDA": "uda,plain",
    "SemiFL": "semifl,plain",
    "FedIL": "fedil,plain",
    "FedRGD": "fedrgd,plain",
    "(FL)^2": "fl2,plain",
    "FedOpenMatch": "fedopenmatch,plain",
    "SAGE": "sage,plain",
    "ProxyFL": "proxyfl,plain",
    "FedAnchor": "fedanchor,plain",
}
CLIENTS = {
    "labels alone": "supervised,plain",
    "FixMatch": "fixmatch,plain",
    "UDA": "uda,plain",
    "FedLabel": "fedlabel,plain",
    "FedDB": "feddb,plain",
    "FedDure": "feddure,plain",
    "FedPDM": "fedpdm,plain",
    "FedOpenMatch": "fedopenmatch,plain",
    "SAGE": "sage,plain",
    "ProxyFL": "proxyfl,plain",
    "FedAvg-Semi": "fedavg_semi,plain,flexmatch",
    "SemiAnAgg": "semianagg,plain,flexmatch",
    "RSCFed": "rscfed,plain",
    "CBAFed": "cbafed,plain",
    "Twin-sight": "twin_sight,plain",
}
# The best of RATES by the validation accuracy of the last five rounds.
CHOSEN = {
    "server": dict.fromkeys(SERVER, 0.03),
    "mnist_server": {**dict.fromkeys(SERVER, 0.03), "labels alone": 0.003, "FedRGD": 0.003, "ProxyFL": 0.3},
    "clients": {
        **dict.fromkeys(CLIENTS, 0.03),
        **dict.fromkeys(("FedDB", "ProxyFL", "FedAvg-Semi", "SemiAnAgg", "CBAFed", "Twin-sight"), 0.3),
        "FedLabel": 0.003,
    },
    "mnist_clients": {
        **dict.fromkeys(CLIENTS, 0.03),
        **dict.fromkeys(("ProxyFL", "FedAvg-Semi", "SemiAnAgg"), 0.3),
        "FedLabel": 0.003,
    },
}
OF_METHOD = {
    "server_only,plain": {"data.alpha": 1000.0},  # no clients, so their partition does not matter
    # Server momentum moves a single model; FedRGD has one for each group.
    "fedrgd,strong": {"model.normalisation": "group", "aggregation.optimizer": "fedavg"},
}
FEDERATION = {
    "num_clients": 40,
    "clients_per_round": 8,
    "data.examples_per_client": 80,
    "client.batch_size": 20,
    "client.epochs": 1,
    "log.report": False,
    "log.tensorboard": False,
}
FROZEN = {**FEDERATION, "num_rounds": 20, "model.normalisation": "none"}
AT_CLIENTS = {**FROZEN, "data.labels": "clients", "data.server_labels": 0}
SCRATCH = {**FEDERATION, "num_rounds": 100, "model.name": "cnn"}
# Config file, common fields, methods, the field for the number of labels, its values.
PARTS = {
    "server": ("configs/cifar10_frozen.py", FROZEN, SERVER, "data.server_labels", (10, 40, 250, 500)),
    "clients": ("configs/cifar10_frozen.py", AT_CLIENTS, CLIENTS, "data.num_labelled", (40, 250, 500)),
}
ROWS = ("server_choose", "server", "mnist_server", "clients_choose", "clients", "mnist_clients", "scratch")


def with_rate(arguments, rate):
    rates = ("client.learning_rate", "server.learning_rate", "server.pretrain_learning_rate")
    return arguments, {**dict.fromkeys(rates, rate), **OF_METHOD.get(arguments, {})}


def get_sweep(part="server"):
    if part == "scratch":
        strong = {name: arguments.replace("plain", "strong") for name, arguments in SERVER.items()}
        methods = {name: (arguments, OF_METHOD.get(arguments, {})) for name, arguments in strong.items()}
        fields = {"data.server_labels": (40, 500), "data.alpha": (0.1,)}
        return Sweep("configs/fedanchor_cifar10.py", methods, (0, 1, 2), fields, SCRATCH)
    place, choose = part.removeprefix("mnist_").removesuffix("_choose"), part.endswith("_choose")
    config, common, methods, labels, numbers = by_argument(PARTS, place)
    if choose:
        rows = {f"{name}, {rate:g}": with_rate(words, rate) for name, words in methods.items() for rate in RATES}
        return Sweep(config, rows, (7,), common={**common, "data.validation": 500, labels: 40, "data.alpha": 0.1})
    rows = {name: with_rate(methods[name], rate) for name, rate in CHOSEN[part].items()}
    return Sweep(config, rows, (0, 1, 2), {labels: numbers, "data.alpha": (0.1, 1000.0)}, common)
