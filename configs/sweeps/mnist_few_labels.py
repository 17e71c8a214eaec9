"""All methods for a few labels at every client, on MNIST: ten labels at each of 20 clients.

    python launch.py sweep configs/sweeps/mnist_few_labels.py --workdir=runs/mnist_few_labels
    python launch.py sweep configs/sweeps/mnist_few_labels.py:one_change --workdir=runs/mnist_few_labels_one_change
    python launch.py sweep configs/sweeps/mnist_few_labels.py:double_step --workdir=runs/mnist_few_labels_double_step

The small CNN, 20 clients of 100 images, 8 a round, labels for 10 of each client's images, LDA 0.1, 40 rounds, 3 seeds.
Five local epochs over the 90 unlabelled images are 45 steps. FedAvg and FedProx on labels alone, and FedLabel, which
counts steps, take 45, too. FedMatch takes 5 of each kind, and FedTriNet 5 while it trains on labels alone, because
their epochs are over the labelled images. FedTriNet's schedule for 100 rounds is shortened to 40.
`one_change` asks with single changes, seeds 0 and 1, why FedTriNet and FedLabel end below the labels alone and SAGE
below FixMatch, and what FedDB's debiasing does to FixMatch-GPL. `double_step` asks whether FedLabel's longer step is
the reason.
"""

from fedjax_ssl.sweep import Sweep, by_argument

STEPS = 45
SHORTENED = {
    "fedtrinet.warm_up_rounds": 16,
    "fedtrinet.full_rounds": 4,
    "fedtrinet.decay_rounds": 20,
    "fedtrinet.protected_from": 14,
    "fedtrinet.ramp_from": 20,
    "fedtrinet.ramp_epochs": 40,
}
LABELS_ALONE = {"client.epochs": STEPS}
IN_STEPS = {"fedlabel.labelled_steps": STEPS, "fedlabel.unlabelled_steps": STEPS}
METHODS = {
    "All labels": "supervised,all_labels",
    "FedAvg": ("supervised", LABELS_ALONE),
    "FedProx": ("supervised,fedprox", LABELS_ALONE),
    "FedAvg+UDA": "uda",
    "FedProx+UDA": "uda,fedprox",
    "FixMatch, local labels": "fixmatch,lpl",
    "FixMatch, global labels": "fixmatch,gpl",
    "FedProx+FixMatch": "fixmatch,fedprox",
    "FedTriNet": ("fedtrinet", SHORTENED),
    "FedMatch": "fedmatch",
    "FedLabel": ("fedlabel", IN_STEPS),
    "FedLabel, the code's": ("fedlabel,code", {**IN_STEPS, "fedlabel.unlabelled_from": 0}),
    "SAGE": "sage",
    "ProxyFL": "proxyfl",
}
ONE_CHANGE = {
    "FedTriNet, labels alone to the end": ("fedtrinet", {**SHORTENED, "fedtrinet.warm_up_rounds": 40}),
    "FedTriNet, one player": ("fedtrinet,one_player", SHORTENED),
    "FedTriNet, two blocks in the head part": ("fedtrinet", {**SHORTENED, "fedtrinet.head_blocks": 2}),
    "FedLabel, its own steps": "fedlabel",
    "FedLabel, no unlabelled image": ("fedlabel", {**IN_STEPS, "fedlabel.unlabelled_from": 40}),
    "FedLabel, the global expert": ("fedlabel,only_global", IN_STEPS),
    "FedLabel, threshold 0.9": ("fedlabel", {**IN_STEPS, "confidence.threshold": 0.9}),
    "FixMatch, FedDB's debiasing": ("fixmatch,gpl", {"confidence.debias": "app_u"}),
    "SAGE, near-IID pairs": ("sage", {"data.partition": "dirichlet_pairs"}),
    "FixMatch, near-IID pairs": ("fixmatch,lpl", {"data.partition": "dirichlet_pairs"}),
}
STATIC = {"model.normalisation": "static", "model.statistics": "cohort"}  # recomputed for the aggregated model


def server_step(times):
    return {"aggregation.optimizer": "fedavgm", "aggregation.momentum": 0.0, "aggregation.learning_rate": times}


DOUBLE_STEP = {
    "FedAvg": ("supervised", LABELS_ALONE),
    "FedAvg, twice the step": ("supervised", {**LABELS_ALONE, **server_step(2.0)}),
    "FedLabel": ("fedlabel", IN_STEPS),
    "FedLabel, half the step": ("fedlabel", {**IN_STEPS, **server_step(0.5)}),
    "FedAvg, static": ("supervised", {**LABELS_ALONE, **STATIC}),
    "FedLabel, static": ("fedlabel", {**IN_STEPS, **STATIC}),
    "FedLabel, half the step, static": ("fedlabel", {**IN_STEPS, **STATIC, **server_step(0.5)}),
}
ROWS = {
    "methods": (METHODS, (0, 1, 2)),
    "one_change": (ONE_CHANGE, (0, 1)),
    "double_step": (DOUBLE_STEP, (0, 1, 2)),
}


def get_sweep(rows="methods"):
    methods, seeds = by_argument(ROWS, rows)
    return Sweep(
        config="configs/fedanchor_mnist.py",
        common={
            "num_rounds": 40,
            "num_clients": 20,
            "clients_per_round": 8,
            "data.labels": "clients",
            "data.labelled_share": 0.1,
            "data.alpha": 0.1,
            "data.examples_per_client": 100,
        },
        methods=methods,
        seeds=seeds,
        target_accuracy=0.7,
    )
