"""The claims of the papers, at our scale: a board of runs for each group of claims.

    python launch.py sweep configs/sweeps/claims.py:BOARD --workdir=runs/BOARD --tries=6
    python docs/claims.py add runs/BOARD BOARD
    python docs/claims.py    # writes docs/claims.md

A board is named PAPER_DATA, as `fedanchor_mnist`; PAPER may have a part, as `fedlabel_numbers`. All rows of a board
have the recipe `plain`, the small CNN, the same clients, labels and steps. Each has six tries of its learning rates,
and of its threshold if it has one, on validation images of another seed and in half of the rounds. Rows that differ
from another in one choice draw theirs as well. The test set is measured in every third round: the last five
measurements are a run's accuracy. docs/claims/claims.toml has the claims and names the two rows that each compares.
MNIST is `mnist`, or a file: --config.data.source=npz --config.data.path=FILE, and likewise CIFAR-10, with
--config.data.flip=True. Digits are scikit-learn's.
"""

from fedjax_ssl.sweep import Sweep, by_argument
from fedjax_ssl.sweep.search import LogUniform, Search, is_named

ROUNDS = 30
COMMON = {
    "num_rounds": ROUNDS,
    "eval_every": 3,
    "client.epochs": 1,
    "client.batch_size": 20,
    "server.epochs": 1,
    "log.tensorboard": False,
    "log.report": False,
}
RATES = {"client.learning_rate": LogUniform(0.003, 0.3)}
WITH_SERVER = {**RATES, "server.learning_rate": LogUniform(0.003, 0.3)}
COHORT = {"num_clients": 20, "clients_per_round": 5}
THRESHOLD = {"confidence.threshold": (0.5, 0.7, 0.8, 0.9, 0.95)}
# The methods' own thresholds: the first try names its own, too, so that all tries of a row share their programs.
OWN = {
    "FedAnchor*": 0.6,
    "FedAnchor, its server alone": 2.0,  # no image passes
    "SemiFL*": 0.95,
    "FixMatch": 0.95,
    "UDA": 0.8,
    "FedIL*": 0.95,
    "FedMatch": 0.85,
    "SAGE": 0.95,
    "ProxyFL*": 0.95,
    "Twin-sight*": 0.95,
    "FedLabel*": 0.3,
    "IsoFed": 0.95,
}

# --- Labels at the server: FedAnchor's Tables 1 to 3 and its figures, FedIL's Tables I to III and Figures 5 and 6. ----

SERVER = {**COHORT, "data.labels": "server"}
IID = {"data.alpha": 1000.0}
FEDANCHOR = {
    "Labels alone": "server_only,plain",
    "FedAnchor": "fedanchor,plain",
    "FedAnchor, no contrastive loss": "fedanchor,plain,no_contrastive",
    "SemiFL": "semifl,plain",
    "FedAnchor, no mixup": "fedanchor,plain,no_mixup",
    "FedAnchor, server mixup": "fedanchor,plain,server_mixup",
    "FedAnchor, client and server mixup": "fedanchor,plain,mix",
    "SemiFL, no mixup": "semifl,plain,no_mixup",
    "FixMatch": "fixmatch,plain",
    "FedCon": "plain,fedcon",
    "All labels": "supervised,all_labels,plain",
    "FedAnchor, its server alone": "fedanchor,plain,no_clients",
}
FEDANCHOR_SPACE = {
    "*": WITH_SERVER,
    "SemiFL*": THRESHOLD,
    "FixMatch": THRESHOLD,
    "FedAnchor*": {"confidence.threshold": (0.2, 0.4, 0.6, 0.8)},
    "FedAnchor, its server alone": {"confidence.threshold": (2.0,)},
}
NATURAL = (
    "Labels alone", "FedAnchor", "FedAnchor, its server alone", "FedAnchor, no contrastive loss", "SemiFL", "FixMatch",
    "All labels",
)  # fmt: skip
# A fifth and four times as many labels.
ANCHORS = {
    "FedAnchor, 20 labels": ("fedanchor,plain", {"data.server_labels": 20}),
    "FedAnchor, 400 labels": ("fedanchor,plain", {"data.server_labels": 400}),
    "All labels, 400 at the server": ("supervised,all_labels,plain", {"data.server_labels": 400}),
}
FEDIL = {
    "Labels alone": "server_only,plain",
    "FedIL": "fedil,plain",
    "FedIL, no cosine screening": "fedil,plain,no_cosine",
    "FedIL, no pseudo-label set": "fedil,plain,no_label_set",
    "FedIL, neither": "fedil,plain,plain_fedil",
    "FedIL, k = 2": ("fedil,plain", {"fedil.successive": 2}),
    "FedIL, k = 4": ("fedil,plain", {"fedil.successive": 4}),
    "FedIL, 10 clients a round": ("fedil,plain", {"clients_per_round": 10}),
    "FedIL, 20 clients a round": ("fedil,plain", {"clients_per_round": 20}),
    "FedIL, 5 local epochs": ("fedil,plain", {"client.epochs": 5}),
    "FedIL, 10 local epochs": ("fedil,plain", {"client.epochs": 10}),
    "FedMatch": "fedmatch,at_server,plain",
    # Single changes.
    "FedIL, 5 server epochs": ("fedil,plain", {"server.epochs": 5}),
    "FedIL, no pre-training": ("fedil,plain", {"server.pretrain_epochs": 0}),
    "FedIL, no threshold": ("fedil,plain", {"confidence.threshold": 0.0}),
    "FedIL, 20 clients a round, k = 2": ("fedil,plain", {"clients_per_round": 20, "fedil.successive": 2}),
}
FEDIL_SPACE = {"*": WITH_SERVER, "Fed*": THRESHOLD, "FedIL, no threshold": {"confidence.threshold": (0.0,)}}

# --- Some clients have all labels: SemiAnAgg's tables and figures. ----------------------------------------------------

SOME = {
    "num_clients": 10,
    "clients_per_round": 10,
    "data.labels": "some_clients",
    "data.labelled_clients": 1,
    "data.labelled_rule": "most_classes",
    "data.partition": "dirichlet_clients",
    "data.alpha": 0.8,
}
SEMIANAGG = {
    "Labels alone": "supervised,plain",
    "FedAvg": "fedavg_semi,together,plain,flexmatch",
    "FedAvg-Semi": "fedavg_semi,plain,flexmatch",
    "FedAvg-Semi, uniform": "fedavg_semi,uniform,plain,flexmatch",
    "SemiAnAgg": "semianagg,plain,flexmatch",
    "SemiAnAgg, another anchor": ("semianagg,plain,flexmatch", {"semianagg.anchor_seed": 1}),
    "CBAFed": "cbafed,plain",
    "RSCFed": ("rscfed,plain", {"rscfed.beta": 1e4, "rscfed.beta_labelled": 100.0}),
    "RSCFed, smaller beta": "rscfed,plain",
    "IsoFed": "isofed,plain",
    "All labels": "supervised,all_labels,plain",
    # With other local training.
    "FedAvg-Semi, SoftMatch": ("fedavg_semi,plain", {"confidence.kind": "softmatch"}),
    "SemiAnAgg, SoftMatch": ("semianagg,plain", {"confidence.kind": "softmatch"}),
    "FedAvg-Semi, ACR": ("fedavg_semi,plain", {"confidence.kind": "acr"}),
    "SemiAnAgg, ACR": ("semianagg,plain", {"confidence.kind": "acr"}),
}
SEMIANAGG_SPACE = {"*": RATES, "FedAvg*": THRESHOLD, "SemiAnAgg*": THRESHOLD, "IsoFed": THRESHOLD}
# The paper's methods start from the labelled client's model. CBAFed has a warm-up of its own.
SEMIANAGG_WARM = {name: row for name, row in SEMIANAGG.items() if name not in ("CBAFed", "All labels")}
FEW = ("Labels alone", "FedAvg-Semi", "FedAvg-Semi, uniform", "SemiAnAgg", "CBAFed")
SEMIANAGG_FEW = {name: SEMIANAGG[name] for name in FEW}
SEMIANAGG_FIXED = {**SEMIANAGG_FEW, "SemiAnAgg, fixed threshold": "semianagg,plain"}
# Client 0 has all labels, and one of the others is left out.
LEFT_OUT = {
    "SemiAnAgg": SEMIANAGG["SemiAnAgg"],
    **{f"SemiAnAgg, without client {k}": (SEMIANAGG["SemiAnAgg"], {"data.left_out": k}) for k in range(1, 10)},
}
FIRST_LABELLED = {"data.labels": "profile", "data.label_profile": (1, *(0 for _ in range(9))), "data.server_labels": 0}

# --- Labels at every client: FedLabel's tables and figures. All rows take 40 steps of 20 images in a round, as FedLabel
# does on labelled and unlabelled images together, without momentum, at rates around its paper's 0.003. ---------------

CLIENTS = {
    **COHORT,
    "data.labels": "clients",
    "data.labelled_share": 0.2,
    "data.alpha": 0.1,
    "client.momentum": 0.0,
    "client.learning_rate": 0.01,
}
STEPS = 40
FEDLABEL = {
    "Labels alone": "supervised,plain",
    "FedLabel": "fedlabel,plain",
    "FedLabel, only local": "fedlabel,plain,only_local",
    "FedLabel, only global": "fedlabel,plain,only_global",
    "FedLabel, no consistency": "fedlabel,plain,no_consistency",
    "FixMatch": "fixmatch,plain",
    "UDA": "uda,plain",
    "All labels": "supervised,all_labels,plain",
    "FedMatch": "fedmatch,plain",
    "FedProx": "supervised,plain,fedprox",
    # Single changes.
    "FedLabel, half the step": (
        "fedlabel,plain",
        {"aggregation.optimizer": "fedavgm", "aggregation.momentum": 0.0, "aggregation.learning_rate": 0.5},
    ),
    "FedLabel, no image passes": ("fedlabel,plain", {"confidence.threshold": 1.0}),
}
FEDLABEL_SPACE = {
    "*": {"client.learning_rate": LogUniform(0.001, 0.1)},
    "FixMatch": THRESHOLD,
    "UDA": THRESHOLD,
    "FedMatch": THRESHOLD,
    "FedLabel*": {"confidence.threshold": (0.1, 0.3, 0.5, 0.7, 0.9)},
    "FedLabel, no image passes": {"confidence.threshold": (1.0,)},
}
SLOW = {"client.learning_rate": 0.003}
EXPERTS = {  # the parts of FedLabel, and other values of its numbers
    "FedLabel": "fedlabel,plain",
    "FedLabel, lambda_0 = 0.5": ("fedlabel,plain", {"fedlabel.consistency_weight": 0.5}),
    "FedLabel, 5 labelled steps": ("fedlabel,plain", {"fedlabel.labelled_steps": 5}),
    "FedLabel, 15 labelled steps": ("fedlabel,plain", {"fedlabel.labelled_steps": 15}),
    "FedLabel, beta = 0.1": ("fedlabel,plain", {"confidence.threshold": 0.1}),
    "FedLabel, beta = 0.5": ("fedlabel,plain", {"confidence.threshold": 0.5}),
    "FedLabel, beta = 0.9": ("fedlabel,plain", {"confidence.threshold": 0.9}),
    "FedLabel, entropy": "fedlabel,plain,entropy",
    "FedLabel, weak views": ("fedlabel,plain", {"augment.flavour": "none"}),
    "FedLabel, weak views, beta = 0.1": ("fedlabel,plain", {"augment.flavour": "none", "confidence.threshold": 0.1}),
    "FedLabel, weak views, beta = 0.9": ("fedlabel,plain", {"augment.flavour": "none", "confidence.threshold": 0.9}),
    # Single changes.
    "FedLabel, 60 labelled steps": ("fedlabel,plain", {"fedlabel.labelled_steps": 60}),
    "FedLabel, entropy, beta = 0.1": ("fedlabel,plain,entropy", {"confidence.threshold": 0.1}),
    "FedLabel, entropy, beta = 0.5": ("fedlabel,plain,entropy", {"confidence.threshold": 0.5}),
    "FedProx, mu = 0.001": ("supervised,plain,fedprox", {"client.epochs": 40, "client.proximal": 0.001}),
    # The paper's rate, and 40 steps for all.
    "FedLabel, rate 0.003": ("fedlabel,plain", SLOW),
    "Labels alone, rate 0.003": ("supervised,plain", {**SLOW, "client.epochs": 40}),
    "FixMatch, rate 0.003": ("fixmatch,plain", {**SLOW, "client.epochs": 13}),
    "UDA, rate 0.003": ("uda,plain", {**SLOW, "client.epochs": 13}),
}
EXPERTS_SPACE = {  # FedLabel's threshold stays
    "*": FEDLABEL_SPACE["*"],
    "FixMatch*": THRESHOLD,
    "UDA*": THRESHOLD,
    "*, rate 0.003": {"client.learning_rate": (0.003,)},
}

# --- Why some methods are behind on the leaderboard: seven labels at every client, or all labels at three of 20. ------

SEVEN = {
    **COHORT,
    "data.labels": "clients",
    "data.labelled_share": 0.1,
    "data.alpha": 0.5,
}
CHANGES = {
    "Labels alone": "supervised,plain",
    "FixMatch": "fixmatch,plain",
    "FedDB": "feddb,plain",
    "FedDB, 10 local epochs": ("feddb,plain", {"client.epochs": 10}),
    "FedDB, no debiasing": "feddb,plain,no_debiasing",
    "FedMatch": "fedmatch,plain",
    "FedMatch, 5 local epochs": ("fedmatch,plain", {"client.epochs": 5}),
    "FedMatch, no L2 term": ("fedmatch,plain", {"fedmatch.l2_weight": 0.0}),
    "SemiAnAgg": "semianagg,plain,flexmatch",
    "SemiAnAgg, fixed threshold": "semianagg,plain",
    "CBAFed": "cbafed,plain",
    "SAGE": "sage,plain",
    "ProxyFL": "proxyfl,plain",
    "ProxyFL, mean over the batch": ("proxyfl,plain", {"proxyfl.loss_over": "batch"}),
    "ProxyFL, no contrastive loss": "proxyfl,plain,no_contrastive",
}
THREE = {
    **COHORT,
    "data.labels": "some_clients",
    "data.labelled_clients": 3,
    "data.alpha": 0.5,
}
CHANGES_SOME = {
    "Labels alone": "supervised,plain",
    "SemiAnAgg": "semianagg,plain",
    "SemiAnAgg, FlexMatch": "semianagg,plain,flexmatch",
    "SemiAnAgg, 20 clients a round": ("semianagg,plain", {"clients_per_round": 20}),
    "CBAFed": "cbafed,plain",
    "CBAFed, no second labels": ("cbafed,plain", {"cbafed.second_labels": False}),
    "CBAFed, 20 clients a round": ("cbafed,plain", {"clients_per_round": 20}),
    "IsoFed": "isofed,plain",
    "IsoFed, no adaptation": "isofed,plain,no_adaptation",
    "RSCFed": "rscfed,plain",
    "Twin-sight": "twin_sight,plain",
    "Twin-sight, no contrastive loss": ("twin_sight,plain", {"twin_sight.contrastive_weight": 0.0}),
    "Twin-sight, no neighbourhood loss": "twin_sight,plain,no_neighbourhood",
}
CHANGES_SPACE = {
    "*": RATES,
    **dict.fromkeys(("FixMatch", "FedMatch*", "SemiAnAgg*", "SAGE", "ProxyFL*", "IsoFed*", "Twin-sight*"), THRESHOLD),
}

# --- Labels at the server, clients as on the leaderboard: FedU and FedEMA. --------------------------------------------

FEDEMA = {
    "FedU": "fedu,plain",
    "FedEMA": "fedema,plain",
    # Single changes.
    "FedEMA, lambda = 1": "fedema,plain,constant",
    "FedEMA, selective": ("fedema,plain", {"fedema.selective": True}),
}

# --- Boards. ----------------------------------------------------------------------------------------------------------

# Config file, validation images of the tries, fields of the data.
DATA = {
    "mnist": ("configs/fedanchor_mnist.py", 500, {"data.examples_per_client": 100}),
    "cifar10": (
        "configs/fedanchor_cifar10.py", 500,
        {"data.examples_per_client": 100, "data.server_labels": 500, "model.name": "cnn"},
    ),
    "digits": ("configs/quickstart.py", 100, {}),
}  # fmt: skip
# Epochs that make 40 steps: a client has 100 images of MNIST or 69 digits, 20 or 14 of them with labels.
EPOCHS = {
    "mnist": {"Labels alone": 40, "FedProx": 40, "FixMatch": 10, "UDA": 10, "All labels": 8, "FedMatch": 20},
    "digits": {"Labels alone": 40, "FedProx": 40, "FixMatch": 13, "UDA": 13, "All labels": 10, "FedMatch": 20},
}
STEPWISE = {
    data: {name: (row, {"client.epochs": epochs[name]}) if name in epochs else row for name, row in FEDLABEL.items()}
    for data, epochs in EPOCHS.items()
}
TENTH = {"data.labels": "clients", "data.labelled_share": 0.1}
# Data, fields of the setting, rows, what their tries draw.
ROWS = {
    "fedanchor_mnist": ("mnist", {**SERVER, "data.alpha": 0.1}, FEDANCHOR, FEDANCHOR_SPACE),
    "fedanchor_digits": ("digits", {**SERVER, "data.alpha": 0.1}, FEDANCHOR, FEDANCHOR_SPACE),
    "spread_digits": (
        "digits", {**SERVER, "data.alpha": 0.1}, {row: FEDANCHOR[row] for row in ("FedAnchor", "SemiFL")},
        FEDANCHOR_SPACE,
    ),
    "fedanchor_iid_mnist": ("mnist", {**SERVER, **IID}, FEDANCHOR, FEDANCHOR_SPACE),
    "fedanchor_iid_digits": ("digits", {**SERVER, **IID}, FEDANCHOR, FEDANCHOR_SPACE),
    "fedanchor_cifar10": (
        "cifar10", {**SERVER, "data.alpha": 0.1}, {row: FEDANCHOR[row] for row in NATURAL}, FEDANCHOR_SPACE,
    ),
    "fedanchor_anchors_digits": ("digits", {**SERVER, "data.alpha": 0.1}, ANCHORS, FEDANCHOR_SPACE),
    "fedanchor_anchors_iid_digits": ("digits", {**SERVER, **IID}, ANCHORS, FEDANCHOR_SPACE),
    "fedil_mnist": ("mnist", {**SERVER, **IID}, FEDIL, FEDIL_SPACE),
    "fedil_digits": ("digits", {**SERVER, **IID}, FEDIL, FEDIL_SPACE),
    "semianagg_mnist": ("mnist", SOME, SEMIANAGG, SEMIANAGG_SPACE),
    "semianagg_digits": ("digits", SOME, SEMIANAGG, SEMIANAGG_SPACE),
    "semianagg_warm_digits": ("digits", SOME, SEMIANAGG_WARM, SEMIANAGG_SPACE),
    "semianagg_unlabelled_digits": ("digits", SOME, SEMIANAGG_FEW, SEMIANAGG_SPACE),
    "semianagg_two_digits": ("digits", {**SOME, "data.labelled_clients": 2}, SEMIANAGG_FEW, SEMIANAGG_SPACE),
    "semianagg_apart_digits": ("digits", {**SOME, "data.alpha": 0.1}, SEMIANAGG_FIXED, SEMIANAGG_SPACE),
    "semianagg_5_digits": (
        "digits", {**SOME, "num_clients": 5, "clients_per_round": 5}, SEMIANAGG_FEW, SEMIANAGG_SPACE,
    ),
    "semianagg_25_digits": (
        "digits", {**SOME, "num_clients": 25, "clients_per_round": 25}, SEMIANAGG_FEW, SEMIANAGG_SPACE,
    ),
    "semianagg_50_mnist": (
        "mnist", {**SOME, "num_clients": 50, "clients_per_round": 50}, SEMIANAGG_FEW, SEMIANAGG_SPACE,
    ),
    "semianagg_left_out_digits": ("digits", {**SOME, **FIRST_LABELLED}, LEFT_OUT, SEMIANAGG_SPACE),
    "semianagg_partial_digits": ("digits", {**SOME, **TENTH}, SEMIANAGG_FIXED, SEMIANAGG_SPACE),
    "fedlabel_mnist": ("mnist", CLIENTS, STEPWISE["mnist"], FEDLABEL_SPACE),
    "fedlabel_digits": ("digits", CLIENTS, STEPWISE["digits"], FEDLABEL_SPACE),
    "fedlabel_half_digits": ("digits", {**CLIENTS, "data.labelled_share": 0.5}, STEPWISE["digits"], FEDLABEL_SPACE),
    "fedlabel_even_digits": ("digits", {**CLIENTS, "data.alpha": 1.0}, STEPWISE["digits"], FEDLABEL_SPACE),
    "changes_digits": ("digits", SEVEN, CHANGES, CHANGES_SPACE),
    "changes_some_digits": ("digits", THREE, CHANGES_SOME, CHANGES_SPACE),
    "fedema_digits": ("digits", {**SERVER, "data.alpha": 0.5}, FEDEMA, {"*": WITH_SERVER}),
    "fedlabel_numbers_digits": ("digits", CLIENTS, EXPERTS, EXPERTS_SPACE),
}  # fmt: skip
WARM_UPS = {  # in the second, from appendix A of the paper, nobody has labels
    "semianagg_warm_digits": ("supervised,plain", {"num_rounds": ROUNDS}),
    "semianagg_unlabelled_digits": (
        "fedu,plain",
        {
            "num_rounds": ROUNDS,
            "data.labels": "server",
            "data.server_labels": 0,
            "model.projector_hidden": 256,
            "model.projector_dim": 128,
        },
    ),
}  # fmt: skip


# What these rows had by default when their runs were made; that of FedMatch is its paper's.
BEFORE = {"FedIL": {"server.pretrain_epochs": 20}, "FedMatch": {"fedmatch.l2_weight": 10.0}}


def with_threshold(name, method):
    """A row that names its own threshold, if it has one."""
    words, fields = (method, {}) if isinstance(method, str) else method
    own = [value for title, value in OWN.items() if is_named(name, title)]
    before = next((fields for title, fields in BEFORE.items() if name.startswith(title)), {})
    return words, {**({"confidence.threshold": own[-1]} if own else {}), **before, **fields}


def get_sweep(board="fedanchor_mnist"):
    data, fields, methods, space = by_argument(ROWS, board)
    config, validation, of_data = DATA[data]
    return Sweep(
        config=config,
        methods={name: with_threshold(name, method) for name, method in methods.items()},
        common={**COMMON, **of_data, **fields},
        seeds=tuple(range(30)) if board.startswith("spread") else (0, 1, 2, 3, 4),
        warm_up=WARM_UPS.get(board),
        search=Search(space, {"data.validation": validation, "num_rounds": ROUNDS // 2}),
    )
