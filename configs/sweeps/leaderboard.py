"""The leaderboard: every method after the same number of tries of its settings, on one board per place of the labels.

    python launch.py sweep configs/sweeps/leaderboard.py:BOARD --workdir=runs/BOARD --tries=6
    python docs/leaderboard.py add runs/BOARD BOARD
    python docs/leaderboard.py    # writes docs/leaderboard.md

A board is named DATA_LABELS. DATA is `digits`, `mnist`, `cifar10`, `table`, `features`, `digits-defaults` or
`mnist-defaults`; LABELS is `server`, `clients` or `some_clients`. Digits, MNIST and CIFAR-10 have the small CNN.
`table` has the digits as rows of 64 features and an MLP, without the methods that need images. `features` has a linear
head on the features of EfficientNet-Lite0, without the methods that need a backbone with parameters;
docs/results/frozen_encoders.md says how to name its data and weights.
All rows have the recipe `plain`, one local epoch, LDA 0.5 and seeds 0 to 4. Tries draw the learning rates of clients
and server, and the threshold of methods that have one. They use validation images and a separate seed.
Boards of `*-defaults` are run without --tries and ask whether defaults learn: a row is CONFIG:METHOD and nothing else,
with LDA 0.5 as well, 20 clients and seeds 0 to 2.
"""

from fedjax_ssl.sweep import Sweep, by_argument
from fedjax_ssl.sweep.search import LogUniform, Search

RATES = {
    "client.learning_rate": LogUniform(0.003, 0.3),
    "server.learning_rate": LogUniform(0.003, 0.3),
}
THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95)
BY_THRESHOLD = (
    "FixMatch", "UDA", "SemiFL", "FedIL", "FedMatch", "FedRGD", "FedDB", "FedDure", "FedPDM", "(FL)^2", "BSemiFL",
    "FedOpenMatch", "SAGE", "ProxyFL", "FedAvg-Semi", "SemiAnAgg", "IsoFed", "Twin-sight",
)  # fmt: skip
SPACE = {
    "*": RATES,
    **{title: {"confidence.threshold": THRESHOLDS} for title in BY_THRESHOLD},
    "CATCHFed": {"confidence.threshold": THRESHOLDS, "catchfed.energy": (-2.5, -3.0, -4.0, -6.0)},
    "FedAnchor": {"confidence.threshold": (0.2, 0.4, 0.6, 0.8)},
    "FedLabel": {"confidence.threshold": (0.1, 0.3, 0.5, 0.7, 0.9)},
}
FEDTRINET = {  # its schedule for 100 rounds of five local epochs, shortened to 40 rounds of one
    "fedtrinet.warm_up_rounds": 16,
    "fedtrinet.full_rounds": 4,
    "fedtrinet.decay_rounds": 20,
    "fedtrinet.protected_from": 14,
    "fedtrinet.ramp_from": 4,
    "fedtrinet.ramp_epochs": 8,
}
SERVER = {
    "All labels": "supervised,all_labels,plain",
    "Labels alone": "server_only,plain",
    "FixMatch": "fixmatch,plain",
    "UDA": "uda,plain",
    "SemiFL": "semifl,plain",
    "FedIL": "fedil,plain",
    "FedMatch": "fedmatch,at_server,plain",
    "FedCon": "plain,fedcon",
    "FedRGD": ("plain,fedrgd", {"model.normalisation": "group"}),
    "(FL)^2": "fl2,plain",
    "CATCHFed": "catchfed,plain",
    "BSemiFL": "bsemifl,plain",
    "FedU": "fedu,plain",
    "FedEMA": "fedema,plain",
    "Orchestra": "orchestra,plain",
    "FedOpenMatch": "fedopenmatch,plain",
    "SAGE": "sage,plain",
    "ProxyFL": "proxyfl,plain",
    "FedAnchor": "fedanchor,plain",
    "imFed-Semi": "imfed_semi,plain",
}
CLIENTS = {
    "All labels": "supervised,all_labels,plain",
    "Labels alone": "supervised,plain",
    "FixMatch": "fixmatch,plain",
    "UDA": "uda,plain",
    "FedMatch": "fedmatch,plain",
    "FedTriNet": ("fedtrinet,plain", FEDTRINET),
    "FedLabel": "fedlabel,plain",
    "FedDB": "feddb,plain",
    "FedDure": "feddure,plain",
    "FedPDM": "fedpdm,plain",
    "FedOpenMatch": "fedopenmatch,plain",
    "SAGE": "sage,plain",
    "ProxyFL": "proxyfl,plain",
    "FedAvg-Semi": "fedavg_semi,plain",
    "SemiAnAgg": "semianagg,plain",
    "RSCFed": "rscfed,plain",
    "FedCD": "fedcd,plain",
    "CBAFed": "cbafed,plain",
    "Twin-sight": "twin_sight,plain",
}
SOME_CLIENTS = {
    **CLIENTS,
    "IsoFed": "isofed,plain",
    "Fed-Consist": "fed_consist,plain",
    "FedIRM": "fedirm,plain",
    "imFed-Semi": "imfed_semi,plain",
}
del SOME_CLIENTS["FedMatch"]
# Rows and common fields for each place of the labels.
LABELS = {
    "server": (SERVER, {"data.labels": "server"}),
    "clients": (CLIENTS, {"data.labels": "clients", "data.labelled_share": 0.1}),
    "some_clients": (SOME_CLIENTS, {"data.labels": "some_clients"}),
}
COMMON = {
    "num_rounds": 40,
    "num_clients": 20,
    "clients_per_round": 5,
    "data.alpha": 0.5,
    "client.epochs": 1,
    "server.epochs": 1,
    "log.tensorboard": False,
}
LARGER = {"data.examples_per_client": 100, "client.batch_size": 20}
# Config file, its fields, number of labelled clients with `some_clients`, validation images of the tries.
DATA = {
    "digits": ("configs/quickstart.py", {}, 3, 100),
    "mnist": ("configs/fedanchor_mnist.py", LARGER, 2, 500),
    "cifar10": ("configs/fedanchor_cifar10.py", {**LARGER, "model.name": "cnn", "data.server_labels": 500}, 2, 500),
    "table": ("configs/quickstart_table.py", {}, 3, 100),
    "digits-defaults": ("configs/quickstart.py", {}, 3, 100),
    "mnist-defaults": ("configs/fedanchor_mnist.py", {"data.examples_per_client": 100}, 2, 500),
    "features": ("configs/cifar10_frozen.py", {**LARGER, "data.server_labels": 250}, 2, 500),
}
NEED_IMAGES = ("FedMatch", "Orchestra")
LEFT_OUT = {"table": NEED_IMAGES, "features": (*NEED_IMAGES, "FedCon", "FedU", "FedEMA", "FedTriNet")}

# For each board the entries of DATA, then those of LABELS.
ROWS = {f"{data}_{labels}": (*DATA[data], *LABELS[labels]) for data in DATA for labels in LABELS}


def without_recipe(method):
    """A row's words without `plain` and its fields."""
    words = method if isinstance(method, str) else method[0]
    return ",".join(word for word in words.split(",") if word != "plain")


def get_sweep(board="digits_server"):
    config, fields, labelled_clients, validation, methods, of_labels = by_argument(ROWS, board)
    left_out = LEFT_OUT.get(board.partition("_")[0], ())
    methods = {name: method for name, method in methods.items() if name not in left_out}
    common, defaults = COMMON, board.split("_")[0].endswith("-defaults")
    if defaults:
        methods = {name: without_recipe(method) for name, method in methods.items()}
        common = {name: value for name, value in COMMON.items() if "epochs" not in name}
    return Sweep(
        config=config,
        methods=methods,
        common={**common, **fields, **of_labels, "data.labelled_clients": labelled_clients},
        seeds=(0, 1, 2) if defaults else (0, 1, 2, 3, 4),
        search=Search(SPACE, {"data.validation": validation}),
    )
