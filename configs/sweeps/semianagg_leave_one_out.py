"""SemiAnAgg on SVHN with and without each client that has no labels (arXiv 2407.10327).

    python launch.py sweep configs/sweeps/semianagg_leave_one_out.py --workdir=runs/semianagg_leave_one_out

The paper finds no relation between a client's number of images and the accuracy that its absence costs, but one with
its weight r^k in early rounds, which is in the records of "all clients" as `weight_among_unlabelled`; its own numbers
are in a picture alone. Client 0 has all labels, as in RSCFed's published partition, so that the others are 1 to 9.
"""

from fedjax_ssl.sweep import Sweep

UNLABELLED = range(1, 10)


def get_sweep():
    return Sweep(
        config="configs/semianagg_svhn.py",
        methods={
            "all clients": "",
            **{f"without client {client}": ("", {"data.left_out": client}) for client in UNLABELLED},
        },
        common={
            "data.labels": "profile",
            "data.label_profile": (1, *(0 for _ in UNLABELLED)),
            "data.server_labels": 0,
        },
        warm_up=("supervised", {"num_rounds": 250}),
        seeds=(0,),
        target_accuracy=0.8,
    )
