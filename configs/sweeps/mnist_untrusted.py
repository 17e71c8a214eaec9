"""Attacks, poisoned data, privacy, compression and failing clients: FedAnchor and FedAvg on MNIST.

    python launch.py sweep configs/sweeps/mnist_untrusted.py:attacks --workdir=runs/untrusted/attacks
    python launch.py sweep configs/sweeps/mnist_untrusted.py:poison --workdir=runs/untrusted/poison
    python launch.py sweep configs/sweeps/mnist_untrusted.py:privacy --workdir=runs/untrusted/privacy
    python launch.py sweep configs/sweeps/mnist_untrusted.py:compression --workdir=runs/untrusted/compression
    python launch.py sweep configs/sweeps/mnist_untrusted.py:failures --workdir=runs/untrusted/failures

With FedAnchor the server has 100 labels and trains on them after each aggregation. With FedAvg the clients have labels
for all their images and the server has none. The small CNN, clients of 100 images, Dirichlet alpha 0.5, one local
epoch, 15 rounds (attacks: 10), 2 seeds. Ten clients all take part, so 10, 20 and 30 % are 1, 2 and 3 attackers in every
round.
`privacy` needs many clients: 1,000 of 50 images, on average 100 a round, with updates clipped to one of two norms.
`poison` has three methods with labels at the server, IID, 20 rounds: two of ten clients of 200 images hold 40 crafted
images each, on lines to four target images of a 4 that should become a 9. In its control they hold only the two ends of
each line.
The results are in docs/results/robustness.md.
"""

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.sweep import Sweep

METHODS = {
    "FedAnchor": ("fedanchor", {}),
    "FedAvg": ("supervised", {"data.labels": "clients", "data.labelled_share": 1.0, "data.server_labels": 0}),
}
RULES = ("mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median")
# A bound of 0.3 shortens honest updates, too: without an attacker FedAvg then falls from 77 to 33 %.
MEANS = {**{rule: {"aggregation.mean": rule} for rule in RULES}, "norm_bound": {"aggregation.norm_bound": 0.6}}
# A Little Is Enough uses 1.5 deviations on MNIST; its formula would give at most 0.2 with ten clients.
ATTACKS = {
    "sign_flip": {},
    "noise": {},
    "scaled": {},
    "little": {"attack.strength": 1.5},
    "labels": {},
}
AT_SERVER = {name: (name.lower(), {}) for name in ("FixMatch", "FedAnchor", "SemiFL")}
FEW = {"num_clients": 10, "clients_per_round": 10}
MANY = {
    "num_clients": 1000,
    "clients_per_round": 100,
    "data.examples_per_client": 50,
    "privacy.cohorts": "poisson",
    "model.normalisation": "group",
}


def attacks():
    rows = {}
    for mean, own in MEANS.items():
        fields = {**own, "aggregation.byzantine_share": 0.3}
        rows[f"{mean}, nobody attacks"] = {**fields, "attack.share": 0.0}
        for kind, options in ATTACKS.items():
            rows[f"{mean}, {kind}"] = {**fields, "attack.kind": kind, **options}
    return rows


def poison():
    targets = {"attack.kind": "poison", "attack.targets": 4, "aggregation.byzantine_share": 0.3}
    rows = {"mean, both ends alone": {**targets, "attack.strength": 4.0}}
    return rows | {mean: {**targets, "attack.strength": 20.0, **own} for mean, own in MEANS.items()}


def compression():
    kept = {"compression.kind": "top_k"}
    rows = {"as it is": {}, "int8": {"compression.kind": "int8"}}
    for share in (0.2, 0.05, 0.01):
        rows[f"top {100 * share:g} %"] = {**kept, "compression.share": share}
    rows["top 1 %, no memory"] = {**kept, "compression.share": 0.01, "compression.error_feedback": False}
    return rows


def failures():
    late = {"availability.late": 0.3}
    return {
        "all answer": {},
        "30 % do not answer": {"availability.never": 0.3},
        "60 % do not answer": {"availability.never": 0.6},
        "30 % late": late,
        "30 % late, half the weight": {**late, "availability.late_weight": 0.5},
        "30 % late, dropped": {**late, "availability.late_weight": 0.0},
    }


def privacy():
    return {"no noise": {}, **{f"noise {noise}": {"privacy.noise": noise} for noise in (0.5, 1.0, 2.0)}}


PARTS = {
    "attacks": (attacks, METHODS, {**FEW, "num_rounds": 10}, {"attack.share": (0.1, 0.2, 0.3)}),
    "poison": (poison, AT_SERVER, {**FEW, "num_rounds": 20, "data.examples_per_client": 200, "data.alpha": 1000.0}, {}),
    "privacy": (privacy, METHODS, MANY, {"aggregation.clip_norm": (0.1, 1.0)}),
    "compression": (compression, METHODS, FEW, {}),
    "failures": (failures, METHODS, FEW, {}),
}


def get_sweep(part="attacks"):
    if part not in PARTS:
        raise UserError(f"the sweep has no part {part!r}; known: {', '.join(PARTS)}")
    rows, systems, common, fields = PARTS[part]
    return Sweep(
        config="configs/fedanchor_mnist.py",
        common={
            "num_rounds": 15,
            "data.examples_per_client": 100,
            "data.alpha": 0.5,
            "client.epochs": 1,
            "log.report": False,
            **common,
        },
        methods={
            f"{name}, {row}": (words, {**own, **options})
            for name, (words, own) in systems.items()
            for row, options in rows().items()
        },
        fields=fields,
        seeds=(0, 1),
        target_accuracy=0.8,
    )
