"""FedLabel's Table 5: what a round costs in bytes and seconds (ICCV 2023, arXiv 2307.08809).

    python launch.py sweep configs/sweeps/fedlabel_table5.py --workdir=runs/fedlabel_table5

The columns are `MB down`, `MB up` and `seconds`. Four rounds with all of ten clients; a client has at most 500 images,
the average of the paper's hundred clients. The paper's figures for a client and a round, with R parameters and h = 2
helpers:
    FedTriNet   2 R         7.81 s
    FedMatch    (2 + h) R   11.24 s
    FedLabel    2 R         3.76 s
FedTriNet has no warm-up here, so its later rounds are timed. FedMatch sends helpers in every round except the first,
before which nobody has uploaded. Its seconds and bytes with helpers are those of rounds 2 to 4 in timings.jsonl and
metrics.jsonl of its run. Each of its two parts is as large as the model; its bytes count the changed entries.
The paper times equal numbers of local steps, but does not say how many. With 500 images, 100 of them labelled, FedLabel
takes 30 labelled and 10 unlabelled steps. FedMatch also takes 40, 20 of each kind, in ten epochs. FedTriNet takes 10 on
the labels and then up to 40: five epochs of its labelled and accepted images.
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
