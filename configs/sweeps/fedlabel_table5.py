"""FedLabel's Table 5: what a round costs in bytes and seconds (ICCV 2023, arXiv 2307.08809).

    python launch.py sweep configs/sweeps/fedlabel_table5.py --workdir=runs/fedlabel_table5

The columns are `MB down`, `MB up` and `seconds`, of four rounds of ten clients, which are all there are: each has at
most 500 images, as one of a hundred has on average. The paper's, for a client and a round, with R parameters and h = 2
helpers:
    FedTriNet   2 R         7.81 s
    FedMatch    (2 + h) R   11.24 s
    FedLabel    2 R         3.76 s
FedTriNet is timed after its warm-up. FedMatch has helpers in every round but the first, before which nobody has
uploaded: its seconds and bytes with helpers are those of rounds 2 to 4 in timings.jsonl and metrics.jsonl of its run.
Its two parts are as large as the model each, and its bytes are those of the entries that have changed.
The paper counts seconds of as many local steps for all, and does not say how many. Of a client of 500 images, 100 of
them labelled, FedLabel takes 30 and 10; FedMatch as many, 20 of each kind, in ten epochs; FedTriNet 10 on the labels
and then up to 40, as many as its labels and what it has accepted fill in five epochs.
"""

from fedjax_ssl.sweep import Sweep


def get_sweep():
    return Sweep(
        config="configs/fedlabel_cifar10.py",
        methods={
            "FedTriNet": ("fedtrinet", {"fedtrinet.warm_up_rounds": 0}),
            "FedMatch": ("fedmatch", {"fedmatch.helper_interval": 1, "client.epochs": 10}),
            "FedLabel": "",
        },
        common={"num_rounds": 4, "num_clients": 10, "clients_per_round": 10, "data.examples_per_client": 500},
        seeds=(0,),
    )
