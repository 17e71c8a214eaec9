"""How four defaults were chosen, and why one fails: on validation images of seeds that no other board has.

    python launch.py sweep configs/sweeps/defaults.py:fedil --workdir=runs/defaults_fedil
    python launch.py sweep configs/sweeps/defaults.py:rscfed --workdir=runs/defaults_rscfed
    python launch.py sweep configs/sweeps/defaults.py:clipping --workdir=runs/defaults_clipping
    python launch.py sweep configs/sweeps/defaults.py:fedmatch --workdir=runs/defaults_fedmatch
    python launch.py sweep configs/sweeps/defaults.py:fedmatch_clients --workdir=runs/defaults_fedmatch_clients
    python launch.py sweep configs/sweeps/defaults.py:some_clients --workdir=runs/defaults_some_clients

The quickstart. `fedil`: epochs of the server before the first round. `rscfed`: its betas, three of 20 clients labelled.
`clipping`: whether the server clips its gradients, to norm 1. `fedmatch`: the weight of its L2 term, with labels at the
server and at the clients. `some_clients`: why FixMatch fails if three of 20 clients have labels.
"""

from fedjax_ssl.sweep import Sweep, by_argument


def betas(beta, beta_labelled, **more):
    return "rscfed", {"rscfed.beta": beta, "rscfed.beta_labelled": beta_labelled, **more}


CLIPS = {"server.clip_norm": 1.0}
CLIPPED = {
    "Labels alone": "server_only",
    "FixMatch": "fixmatch",
    "UDA": "uda",
    "(FL)^2": "fl2",
    "FedRGD": "fedrgd",
    "FedAnchor": "fedanchor",
}
WEIGHTS = {
    f"L2 {weight:g}, patience {visits}": ("fedmatch", {"fedmatch.l2_weight": weight, "fedmatch.patience": visits})
    for weight, visits in ((10.0, 5), (10.0, 20), (1.0, 20), (0.0, 20), (0.0, 5))
}
ROWS = {
    "fedil": (
        {
            "Labels alone": "server_only",
            **{f"{epochs} epochs": ("fedil", {"server.pretrain_epochs": epochs}) for epochs in (0, 5, 20, 40)},
        },
        {},
    ),
    "clipping": ({**CLIPPED, **{f"{name}, the server clips": (words, CLIPS) for name, words in CLIPPED.items()}}, {}),
    "fedmatch": (WEIGHTS | {"Labels alone": "server_only"}, {}),
    "fedmatch_clients": (
        WEIGHTS | {"Labels alone": "supervised"},
        {"data.labels": "clients", "data.labelled_share": 0.1},
    ),
    "some_clients": (
        {
            "Labels alone": "supervised",
            "FixMatch": "fixmatch",
            "FixMatch, 1 local epoch": ("fixmatch", {"client.epochs": 1}),
            "FixMatch, a tenth of the rate": ("fixmatch", {"client.learning_rate": 0.003}),
            "FedAvg-Semi": "fedavg_semi",
            "FedAvg-Semi, one mean": ("fedavg_semi", {"fedavg_semi.apart": False}),
        },
        {"data.labels": "some_clients", "data.labelled_clients": 3},
    ),
    "rscfed": (
        {
            "Labels alone": "supervised",
            "10000 and 100": betas(1e4, 100.0),
            "1000 and 10": betas(1e3, 10.0),
            "100 and 1": betas(100.0, 1.0),
            "10 and 0.1": betas(10.0, 0.1),
            "100 and 1, received statistics": betas(100.0, 1.0, **{"rscfed.teacher_statistics": "received"}),
        },
        {"data.labels": "some_clients", "data.labelled_clients": 3},
    ),
}


def get_sweep(method="fedil"):
    methods, fields = by_argument(ROWS, method)
    return Sweep(
        config="configs/quickstart.py",
        methods=methods,
        common={**fields, "data.validation": 100, "log.tensorboard": False},
        seeds=(1000, 1001, 1002),
    )
