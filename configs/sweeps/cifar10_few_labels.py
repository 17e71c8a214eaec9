"""Clients with a few labels each on CIFAR-10, in SAGE's protocol with a narrow ResNet-8, as far as hours of a CPU go.

    python launch.py sweep configs/sweeps/cifar10_few_labels.py --workdir=runs/cifar10_few_labels

What differs from configs/sage_cifar10.py, whose docstring has the published order: the ResNet-8 has 8, 16 and 32
channels instead of 64, 128 and 256, and there are 20 rounds instead of 300. Labels alone have ten steps in a round, 25
epochs make them 50; the other methods have 95, FedLabel as many of each kind.
"""

from fedjax_ssl.sweep import Sweep

IN_STEPS = {"fedlabel.labelled_steps": 95, "fedlabel.unlabelled_steps": 95}


def get_sweep():
    return Sweep(
        config="configs/sage_cifar10.py",
        common={"model.width": 8, "num_rounds": 20},
        methods={
            "FedAvg on labels": ("supervised", {"client.epochs": 25}),
            "FixMatch-LPL": "fixmatch",
            "FixMatch-GPL": "fixmatch,gpl",
            "FedLabel": ("fedlabel", IN_STEPS),
            "SAGE": "sage",
            "ProxyFL": "proxyfl",
        },
        seeds=(0,),
        target_accuracy=0.5,
    )
