"""FedLabel's Table 5: what a round costs in bytes and seconds (ICCV 2023, arXiv 2307.08809).

    python launch.py sweep configs/sweeps/fedlabel_table5.py --workdir=runs/fedlabel_table5

The columns are `MB down`, `MB up` and `seconds`, of three rounds of ten clients. The paper's, for a client and a round,
with R parameters and h = 2 helpers:
    FedTriNet   2 R         7.81 s
    FedMatch    (2 + h) R   11.24 s
    FedLabel    2 R         3.76 s
FedTriNet is timed after its warm-up, FedMatch with its helpers from the first round on.
"""

from fedjax_ssl.sweep import Sweep


def get_sweep():
    return Sweep(
        config="configs/fedlabel_cifar10.py",
        methods={
            "FedTriNet": ("fedtrinet", {"fedtrinet.warm_up_rounds": 0}),
            "FedMatch": "fedmatch",
            "FedLabel": "",
        },
        common={"num_rounds": 3},
        seeds=(0,),
    )
