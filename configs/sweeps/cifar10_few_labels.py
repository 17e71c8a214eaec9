"""A few labels at every client on CIFAR-10: SAGE's protocol with a narrow ResNet-8, in hours on a CPU.

    python launch.py sweep configs/sweeps/cifar10_few_labels.py --workdir=runs/cifar10_few_labels
    python launch.py sweep configs/sweeps/cifar10_few_labels.py:warmed --workdir=runs/cifar10_few_labels_warmed
    python launch.py sweep configs/sweeps/cifar10_few_labels.py:proxyfl --workdir=runs/cifar10_few_labels_proxyfl

configs/sage_cifar10.py has the published order of the methods. Differences to it: the ResNet-8 has 8, 16 and 32
channels instead of 64, 128 and 256, and there are 15 rounds of one local epoch instead of 300 of five. An epoch on
labels alone has two steps, so it gets ten epochs, 20 steps. The other methods take 19 steps, FedLabel 19 of each kind.
After 15 rounds hardly any label is confident. `warmed` compares the methods when labels are: 10 rounds after 60 rounds
on labels alone. `proxyfl` asks why ProxyFL's accuracy falls, in 8 rounds: single changes, and all changes of its code.
The single change that helps most is also a row of `warmed`.
"""

from fedjax_ssl.sweep import Sweep, by_argument

ON_LABELS = {"client.epochs": 10}
IN_STEPS = {"fedlabel.labelled_steps": 19, "fedlabel.unlabelled_steps": 19}
METHODS = {
    "FedAvg on labels": ("supervised", ON_LABELS),
    "FixMatch-LPL": ("fixmatch", {"client.epochs": 1}),
    "FixMatch-GPL": ("fixmatch,gpl", {"client.epochs": 1}),
    "FedLabel": ("fedlabel", IN_STEPS),
    "SAGE": ("sage", {"client.epochs": 1}),
    "ProxyFL": ("proxyfl", {"client.epochs": 1}),
}
BATCH = "ProxyFL, eq. 9 over the batch"
PROXYFL = {
    "ProxyFL, its code": ("proxyfl,code", {"client.epochs": 1}),
    "ProxyFL, no contrastive loss": ("proxyfl,no_contrastive", {"client.epochs": 1}),
    "ProxyFL, no tuning": ("proxyfl,no_tuning", {"client.epochs": 1}),
    BATCH: ("proxyfl", {"client.epochs": 1, "proxyfl.loss_over": "batch"}),
    "ProxyFL, one mean over all": ("proxyfl", {"client.epochs": 1, "proxyfl.contrastive_over": "all"}),
}
ROWS = {  # methods, rounds, warm-up
    "fresh": (METHODS, 15, None),
    "warmed": ({**METHODS, BATCH: PROXYFL[BATCH]}, 10, ("supervised", {**ON_LABELS, "num_rounds": 60})),
    "proxyfl": (PROXYFL, 8, None),
}


def get_sweep(rows="fresh"):
    methods, num_rounds, warm_up = by_argument(ROWS, rows)
    return Sweep(
        config="configs/sage_cifar10.py",
        common={"model.width": 8, "num_rounds": num_rounds},
        methods=methods,
        warm_up=warm_up,
        seeds=(0,),
        target_accuracy=0.4,
    )
